"""Folders include only what lies below them: core <- fusion <- ops <- mpi <- session <- frameworks, core <- parallel <- frameworks, and
core <- launch. Inside of a layer its folders stand on floors: one includes those of lower floors, none of its own floor.

Vendors are kept in their rooms too (ROOMS), and the environment in core/base/environment.cc. Each MPI call of mpi/ is one that
the tests can watch.
"""

import os
import re

import tree

MAY_INCLUDE = {
    "core": {"core"},
    "fusion": {"core", "fusion"},
    "parallel": {"core", "parallel"},
    "ops": {"core", "fusion", "ops"},
    "mpi": {"core", "fusion", "ops", "mpi"},
    "tcp": {"core", "fusion", "ops", "tcp"},
    "session": {"core", "fusion", "ops", "mpi", "tcp", "session", "sirtaki"},
    "frameworks": {"core", "fusion", "parallel", "ops", "mpi", "tcp", "session", "frameworks", "sirtaki"},
    "launch": {"core", "launch"},
}
# From the ground up; "" is the layer's own folder.
FLOORS = {
    "core": [["base"], ["threads", "machine", "config"], ["protocol", "trace"], ["engine"]],
    "ops": [["base"], ["groups", "wire", "shm", "cuda"], ["host", "between_hosts", "inproc"], ["nccl"], [""]],
    "session": [["base"], ["inproc", "single"], [""], ["elastic"], ["mpi", "tcp"]],
    "frameworks/torch": [["tensors"], ["session"], ["calls"], ["state", "batch_norm"], ["checkpoint", "gradients"],
                         ["checkpoint/tool", "elastic", "parallel"], [""]],
    "launch": [["base"], ["hosts"], ["options"], ["plan"], ["job", "checks", "reports"], ["elastic"], [""]],
}
OUTSIDE = {"tests", "examples", "benchmarks", "scripts"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
GETENV = re.compile(r"\b(secure_)?getenv\b|\benviron\b")
PUBLIC = "frameworks/include/"
PYTHON = "frameworks/python/"
PYTHON_MAY_INCLUDE = ("sirtaki/", PYTHON, "ops/nccl/nccl_api.h")
LIBTORCH = ("frameworks/", "tests/", "examples/", "benchmarks/")
ROOMS = {
    "ATen": LIBTORCH,
    "c10": LIBTORCH,
    "torch": LIBTORCH,
    "pybind11": (PYTHON,),
    "Python.h": (PYTHON,),
    "mpi.h": ("mpi/", PUBLIC + "sirtaki/mpi.h", "tests/", "benchmarks/"),
    "hwy": ("fusion/", "ops/", "tests/", "benchmarks/"),
    "boost": ("launch/", "tcp/", "tests/"),
    "yaml-cpp": ("launch/", "tests/"),
    "nlohmann": ("core/trace/", "launch/", "tests/"),
    "spdlog": ("core/base/log.cc",),
    "fmt": ("core/base/log.cc",),
    "xxhash.h": ("core/base/digest.cc",),
}
NUMPY = re.compile(r"^\s*(import|from) numpy\b|\.numpy\(\)")
MPI_CALL = re.compile(r"\b(MPI_(?!Comm_(?:[cf]2[cf]|toint|fromint))[A-Z][a-z]\w*)\(")
MPI_WATCH = "tests/support/mpi_interpose.cc"


def folder_of(path):
    return path.split("/")[0]


def place_of(path):
    """The layer with floors that a file is in, its folder there and that folder's floor; the floor is None where it has none."""
    folder = os.path.dirname(path)
    for layer, floors in FLOORS.items():
        if folder == layer or folder.startswith(layer + "/"):
            room = folder[len(layer) + 1:]
            return layer, room, next((i for i, rooms in enumerate(floors) if room in rooms), None)
    return None, "", 0


def judge_floor(name, target):
    """Why `name` may not include `target` of the same layer, or None."""
    layer, room, floor = place_of(name)
    other_layer, other_room, other_floor = place_of(target)
    if layer is None or layer != other_layer or room == other_room:
        return None
    if floor is None or other_floor is None:
        return f"{layer}/{room if floor is None else other_room} is on no floor of {layer}/: give it one in tests/lint/layering.py"
    if other_floor >= floor:
        return f"{layer}/{room} may include only floors below it, and {layer}/{other_room} is not"
    return None


def judge_include(name, target):
    """Why `name` may not include `target`, or None."""
    here, there = folder_of(name), folder_of(target)
    internal = there in MAY_INCLUDE or there == "sirtaki"
    if name.startswith(PUBLIC) and internal and there != "sirtaki":
        return "a public header may not include an internal one: it is not installed"
    if internal and here in MAY_INCLUDE and there not in MAY_INCLUDE[here]:
        return f"{here}/ may include only {', '.join(sorted(MAY_INCLUDE[here]))}"
    why = judge_floor(name, target)
    if why:
        return why
    if there in OUTSIDE and here in MAY_INCLUDE:
        return f"{here}/ may not include {there}/"
    if name.startswith(PYTHON) and internal and not target.startswith(PYTHON_MAY_INCLUDE):
        return f"{PYTHON} may include only {', '.join(PYTHON_MAY_INCLUDE)}"
    if target.startswith(PYTHON) and not name.startswith(PYTHON):
        return f"only {PYTHON} may include {PYTHON}"
    if there in ROOMS and not name.startswith(ROOMS[there]):
        return f"only {', '.join(ROOMS[there])} may include {target}"
    return None


def calls_of_mpi(top, name):
    return {call: number for number, text in tree.lines(top, name) for call in MPI_CALL.findall(text.split("//")[0])}


def main():
    top = tree.root()
    names = tree.files(top, tree.CODE)
    there_are = set(names)
    findings = [f"{n}: {folder_of(n)}/ is in no layer: give it a row of MAY_INCLUDE in tests/lint/layering.py"
                for n in names if folder_of(n) not in MAY_INCLUDE.keys() | OUTSIDE]
    watched = calls_of_mpi(top, MPI_WATCH) if MPI_WATCH in there_are else {}
    for name in names:
        if name.startswith("mpi/"):
            findings += [f"{name}:{number}: {call} is not in {MPI_WATCH}, by which a test sees that it is called under the gate"
                         for call, number in calls_of_mpi(top, name).items() if call not in watched]
        for number, text in tree.lines(top, name):
            match = INCLUDE.match(text)
            why = judge_include(name, match[2]) if match else None
            if why is None and match and match[1] == '"' and folder_of(name) in MAY_INCLUDE:
                if not {match[2], PUBLIC + match[2]} & there_are:
                    why = f"an include in quotes is written from the top of the tree or of {PUBLIC}, and there is no such file"
            if why is None and folder_of(name) in MAY_INCLUDE and name != "core/base/environment.cc":
                if GETENV.search(text.split("//")[0]):
                    why = "only core/base/environment.cc reads the environment"
            if why:
                findings.append(f"{name}:{number}: {text.strip()}\n    {why}")
    for name in tree.files(top, (".py",)):
        if name.startswith(PYTHON):
            findings += [f"{name}:{number}: {text.strip()}\n    the torch wheel does without NumPy, and so does the package"
                         for number, text in tree.lines(top, name) if NUMPY.search(text)]
    tree.report("lint.layering", len(names), findings)


main()
