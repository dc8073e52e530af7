"""A sample of the product's sources compiles by itself: a unity build hides what a file does not include.

The sources are drawn by SIRTAKI_TEST_SEED from those of the build folder: most from those that the last commits changed, the
rest from all. They are compiled with the flags that the build gives them, without precompiled headers, and the examples as C++17,
which users compile them as. A third argument "all"
takes every source, the tests' too, as many at once as SIRTAKI_JOBS says: tests/full.sh headers does so.
"""

import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys
from concurrent import futures

import tree

COUNT = 3
RECENT = 2  # of these
COMMITS = 30


def sources_of(unity):
    return re.findall(r'^#include "(.+\.cc)"$', unity.read_text(encoding="utf-8"), re.MULTILINE)


def alone(command, unity, source):
    """The command that compiles the source in place of the unity file, and writes nothing."""
    words = iter(command)
    kept = []
    for word in words:
        if word == "-o":
            next(words)
        elif word == "-include":
            header = next(words)
            if not header.endswith("cmake_pch.hxx"):
                kept += [word, header]
        elif word not in ("-c", "-Winvalid-pch"):
            kept.append(source if word == unity else word)
    if source not in kept or any("pch" in word for word in kept):
        sys.exit(f"lint.alone: this compiler's command has another form: {shlex.join(command)}")
    return [*kept, "-fsyntax-only"]


def recently_changed(top):
    """What the last commits and the working tree have changed; nothing without git."""
    names = set()
    if not shutil.which("git"):
        return names
    for command in (["log", f"-{COMMITS}", "--name-only", "--format="], ["diff", "HEAD", "--name-only"]):
        names.update(subprocess.run(["git", "-C", top, *command], capture_output=True, text=True, check=False).stdout.split("\n"))
    return {str(top / name) for name in names}


def drawn(top, commands):
    seed = os.environ.get("SIRTAKI_TEST_SEED") or str(random.SystemRandom().randrange(2**32))
    print(f"SIRTAKI_TEST_SEED={seed}")
    draw = random.Random(seed)
    recent = sorted(recently_changed(top) & set(commands))
    sample = draw.sample(recent, min(RECENT, len(recent)))
    rest = sorted(set(commands) - set(sample))
    return sample + draw.sample(rest, min(COUNT - len(sample), len(rest)))


def compiled(source, entry, command):
    """What is wrong with the source; nothing if it compiles."""
    run = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True, check=False)
    return [f"{source}:\n{run.stderr[:2000]}"] if run.returncode != 0 else []


def main():
    top = pathlib.Path(tree.root()).resolve()   # as the build names its files
    every = sys.argv[3:] == ["all"]
    commands = {}
    for entry in json.loads((pathlib.Path(sys.argv[2]) / "compile_commands.json").read_text(encoding="utf-8")):
        file = pathlib.Path(entry["file"])
        command = entry["command"]
        if file.is_relative_to(top / "examples"):
            sources, command = [entry["file"]], command.replace("-std=c++20", "-std=c++17")
        elif "/Unity/" in entry["file"]:
            sources = sources_of(file)
        else:
            continue
        for source in sources:
            if every or not pathlib.Path(source).is_relative_to(top / "tests"):
                commands.setdefault(source, (entry, alone(shlex.split(command), entry["file"], source)))
    if not commands:
        print("lint.alone: skipped: this build compiles every source by itself")
        sys.exit(tree.SKIPPED)
    sample = sorted(commands) if every else drawn(top, commands)
    jobs = int(os.environ.get("SIRTAKI_JOBS") or os.cpu_count()) if every else 1
    with futures.ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda source: compiled(source, *commands[source]), sample)
        tree.report("lint.alone", len(sample), [finding for findings in found for finding in findings])


main()
