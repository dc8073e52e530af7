#!/usr/bin/env bash
# run.sh BUILD_DIR: installs Sirtaki from its build folder into a fresh prefix, builds the project of this folder against
# it, and runs what comes out, alone and on two ranks.
set -euo pipefail
build=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cmake=${CMAKE:-cmake}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/prefix" >"$work/install.log" || { cat "$work/install.log"; exit 1; }
cp "$here/CMakeLists.txt" "$here/main.cc" "$here/mpi_main.cc" "$work/"
launcher=()
if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); export CCACHE_BASEDIR=$work CCACHE_NOHASHDIR=1; fi
"$cmake" -S "$work" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$work/prefix" "${launcher[@]}"
"$cmake" --build "$work/build" --verbose
# Only the installed library may be found.
ldd "$work/build/outside" | grep -F "libsirtaki.so" | grep -F "$work/prefix" ||
  { echo "the outside program does not use the installed library:"; ldd "$work/build/outside"; exit 1; }
# LibTorch::CUDA is there where that library is, and brings it along though nothing of it is named.
if [ -e "$(dirname "$(ldd "$work/build/outside" | sed -n 's/.*libtorch_cpu.so => \(.*\) (.*/\1/p')")/libtorch_cuda.so" ]; then
  readelf -d "$work/build/outside_gpu" | grep -F NEEDED | grep -F libtorch_cuda.so ||
    { echo "the outside program is not linked with LibTorch's part for GPUs"; exit 1; }
fi
"$work/build/outside"
bash "$here/../support/mpirun.sh" 2 "$work/build/outside"
# Sirtaki::mpi is there where the library has MPI, and brings its headers along.
if ldd "$work/build/outside" | grep -F libmpi; then
  [ -x "$work/build/outside_mpi" ] || { echo "find_package(Sirtaki) gave no Sirtaki::mpi, though the library has MPI"; exit 1; }
  bash "$here/../support/mpirun.sh" 2 "$work/build/outside_mpi"
fi
# The installed program finds LibTorch, and needs neither the library nor MPI.
"$work/prefix/bin/sirtaki-checkpoint" --help | diff "$here/../torch/checkpoint/tool/help.txt" -
if ldd "$work/prefix/bin/sirtaki-checkpoint" | grep -E "libmpi|libsirtaki"; then echo "sirtaki-checkpoint needs more than LibTorch"; exit 1; fi
if [ -x "$work/prefix/bin/sirtakirun" ]; then
  ctest --test-dir "$work/build" --output-on-failure --no-tests=error
fi
