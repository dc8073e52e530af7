"""Folders include only what stands to their left: core <- fusion <- ops <- mpi <- frameworks, and core <- launch.

Vendors are kept in their rooms too: <mpi.h> in mpi/ and the public sirtaki/mpi.h, spdlog and fmt in core/log.cc, LibTorch in frameworks/,
Python in frameworks/python/, Highway in fusion/ and ops/, the environment in core/environment.cc. Tests, examples and benchmarks may use them all but spdlog.
"""

import re

import tree

MAY_INCLUDE = {
    "core": {"core"},
    "fusion": {"core", "fusion"},
    "ops": {"core", "fusion", "ops"},
    "mpi": {"core", "fusion", "ops", "mpi"},
    "frameworks": {"core", "fusion", "ops", "mpi", "frameworks", "sirtaki"},
    "launch": {"core", "launch"},
}
OUTSIDE = {"tests", "examples", "benchmarks"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
GETENV = re.compile(r"\b(secure_)?getenv\b|\benviron\b")
PUBLIC = "frameworks/include/"


def folder_of(path):
    return path.split("/")[0]


def judge_include(name, target):
    """Why `name` may not include `target`, or None."""
    here, there = folder_of(name), folder_of(target)
    internal = there in MAY_INCLUDE or there == "sirtaki"
    if name.startswith(PUBLIC) and internal and there != "sirtaki":
        return "a public header may not include an internal one: it is not installed"
    if internal and here in MAY_INCLUDE and there not in MAY_INCLUDE[here]:
        return f"{here}/ may include only {', '.join(sorted(MAY_INCLUDE[here]))}"
    if there in OUTSIDE and here in MAY_INCLUDE:
        return f"{here}/ may not include {there}/"
    if target == "mpi.h" and here != "mpi" and here not in OUTSIDE - {"examples"} and name != PUBLIC + "sirtaki/mpi.h":
        return "only mpi/ includes <mpi.h>, and the public header for programs that do"
    if there in ("spdlog", "fmt") and name != "core/log.cc":
        return "only core/log.cc sees spdlog and fmt"
    if there in ("torch", "ATen", "c10") and here not in OUTSIDE | {"frameworks"}:
        return "LibTorch belongs in frameworks/"
    if (there == "pybind11" or target.startswith("frameworks/python/")) and not name.startswith("frameworks/python/"):
        return "Python belongs in frameworks/python/"
    if there == "hwy" and here not in OUTSIDE | {"fusion", "ops"}:
        return "Highway belongs in fusion/ and ops/"
    return None


def main():
    top = tree.root()
    names = [n for n in tree.files(top, tree.CODE) if folder_of(n) in MAY_INCLUDE.keys() | OUTSIDE]
    findings = []
    for name in names:
        for number, text in tree.lines(top, name):
            match = INCLUDE.match(text)
            why = judge_include(name, match.group(1)) if match else None
            if why is None and folder_of(name) in MAY_INCLUDE and name != "core/environment.cc":
                if GETENV.search(text.split("//")[0]):
                    why = "only core/environment.cc reads the environment"
            if why:
                findings.append(f"{name}:{number}: {text.strip()}\n    {why}")
    tree.report("lint.layering", len(names), findings)


main()
