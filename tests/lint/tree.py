"""The files of the source tree, for the lint tests: what git tracks or would track, or everything where there is no git."""

import os
import shutil
import subprocess
import sys

SKIPPED = 77  # ctest reports this exit code as skipped
CODE = (".h", ".cc", ".cu")


def root():
    """The tree to look at: the first argument, or the one this file is in."""
    if len(sys.argv) > 1:
        return sys.argv[1]
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def files(top, suffixes=None):
    """Paths below top, relative to it, with one of the suffixes if any are given."""
    listing = None
    if shutil.which("git"):
        listing = subprocess.run(["git", "-C", top, "ls-files", "-co", "--exclude-standard", "-z"],
                                 capture_output=True, text=True, check=False)
    if listing is not None and listing.returncode == 0:
        names = listing.stdout.split("\0")
    else:
        names = []
        for folder, subfolders, found in os.walk(top):
            made = (".git", "build", "sirtaki-records")
            subfolders[:] = [s for s in subfolders if s not in made and not s.startswith(".venv")]
            names += [os.path.relpath(os.path.join(folder, name), top) for name in found]
    names = sorted(n for n in names if n and os.path.isfile(os.path.join(top, n)))
    return [n for n in names if suffixes is None or n.endswith(suffixes)]


def lines(top, name):
    """(number, text) for each line; nothing for a file that is not text."""
    try:
        with open(os.path.join(top, name), encoding="utf-8") as file:
            return list(enumerate(file.read().splitlines(), start=1))
    except UnicodeDecodeError:
        return []


def report(title, looked_at, findings):
    """Prints the findings and ends the process with the verdict."""
    if not looked_at:
        print(f"{title}: found no file to look at")
        sys.exit(1)
    for finding in findings:
        print(finding)
    print(f"{title}: {looked_at} files, {len(findings)} findings")
    sys.exit(1 if findings else 0)
