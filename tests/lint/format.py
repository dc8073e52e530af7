"""Every source file is as clang-format 14 and .clang-format would write it."""

import re
import shutil
import subprocess
import sys

import tree


def main():
    top = tree.root()
    program = shutil.which("clang-format-14") or shutil.which("clang-format")
    if program is None:
        print("lint.format: skipped: no clang-format here (SIRTAKI_BOOTSTRAP_WITH=clang-format bash bootstrap.sh installs it)")
        sys.exit(tree.SKIPPED)
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if not re.search(r"version 14\.", version):
        print(f"lint.format: skipped: {version} formats differently; version 14 is needed")
        sys.exit(tree.SKIPPED)
    names = tree.files(top, tree.CODE)
    run = subprocess.run([program, "--dry-run", "--style=file"] + names, cwd=top, capture_output=True, text=True, check=False)
    findings = sorted({":".join(line.split(":")[:2]) for line in run.stderr.splitlines() if "-Wclang-format-violations" in line})
    if run.returncode != 0 or (run.stderr and not findings):
        findings.append(f"clang-format: exit code {run.returncode}: {run.stderr[:500]}")
    if findings:
        print("to mend: clang-format -i " + " ".join(sorted({f.split(":")[0] for f in findings})))
    tree.report("lint.format", len(names), findings)


main()
