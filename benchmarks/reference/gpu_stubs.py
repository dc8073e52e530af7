"""gpu_stubs.py TORCH_FOLDER OUTPUT: empty stand-ins for the GPU libraries that a torch wheel names and that are not there.

The wheel of torch that the tests use is installed without its 4 GB of GPU libraries: C++ programs need none of them.
Python's `import torch` loads libtorch_cuda.so as well, which names them all. On a machine without GPU no function of
theirs is called, so libraries with the right names, versions and symbols, which trap when called, are enough.
"""

import collections
import os
import re
import subprocess
import sys

GPU = re.compile(r"^lib(cu|nv|nccl)")


def readelf(option, path):
    return subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True).stdout


def needed(path):
    return re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-d", path))


def files_of_versions(path):
    """The file that each version name is expected from, as the dynamic linker sees it."""
    files, current = {}, None
    for line in readelf("-V", path).splitlines():
        if found := re.search(r"Version: \d+\s+File: (\S+)", line):
            current = found[1]
        elif (found := re.search(r"Name: (\S+)\s+Flags:", line)) and current:
            files[found[1]] = current
    return files


def undefined(path):
    """(name, version or "") of each function that others must define."""
    for line in readelf("--dyn-syms", path).splitlines():
        fields = line.split()
        if len(fields) > 7 and fields[6] == "UND" and fields[4] != "WEAK":
            name, _, version = fields[7].partition("@")
            yield name, version.lstrip("@")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    libraries = os.path.join(sys.argv[1], "lib")
    packages = os.path.dirname(os.path.abspath(sys.argv[1]))
    output = sys.argv[2]
    present = {name for _, _, names in os.walk(os.path.join(packages, "nvidia")) for name in names}
    stubs = collections.defaultdict(lambda: collections.defaultdict(set))  # library, version, symbols
    unversioned = set()
    for name in ("libtorch_python.so", "libtorch_cuda.so", "libtorch_nvshmem.so", "libtorch_cpu.so"):
        path = os.path.join(libraries, name)
        if not os.path.exists(path):
            continue
        for library in needed(path):
            if GPU.match(library) and library not in present:
                stubs[library]
        files = files_of_versions(path)
        for symbol, version in undefined(path):
            if files.get(version) in stubs:
                stubs[files[version]][version].add(symbol)
            elif not version and re.match(r"(cu|nccl|nvshmem)\w*$", symbol):
                unversioned.add(symbol)
    if not stubs:
        return
    os.makedirs(output, exist_ok=True)
    # Symbols without a version may come from anywhere: all of them from a library without versions.
    home = next((library for library, versions in sorted(stubs.items()) if not versions), None)
    if home is None and unversioned:
        sys.exit("gpu_stubs.py: no library is left for symbols without a version")
    for library, versions in stubs.items():
        source = os.path.join(output, library + ".s")
        script = os.path.join(output, library + ".map")
        symbols = set().union(*versions.values()) | (unversioned if library == home else set())
        with open(source, "w") as file:
            file.write('.text\n.section .note.GNU-stack,"",@progbits\n.text\n')
            for symbol in sorted(symbols):
                file.write(f".globl {symbol}\n.type {symbol}, @function\n{symbol}: ud2\n.size {symbol}, .-{symbol}\n")
        flags = []
        if versions:
            with open(script, "w") as file:
                for version, names in versions.items():
                    file.write(version + " { global: " + "".join(f"{name}; " for name in sorted(names)) + "};\n")
            flags = [f"-Wl,--version-script={script}"]
        subprocess.run(["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{library}", *flags, source, "-o",
                        os.path.join(output, library)], check=True)
        os.remove(source)
        if versions:
            os.remove(script)


main()
