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

# What is linked with the library needs no MPI: that is opened, by a module.
if ldd "$work/build/outside" | grep -F libmpi; then echo "the outside program is linked with MPI"; exit 1; fi
modules=("$work"/prefix/lib*/libsirtaki_mpi_*.so "$work"/prefix/lib/*/libsirtaki_mpi_*.so)
modules=($(ls -d "${modules[@]}" 2>/dev/null || true))
if [ "${#modules[@]}" -gt 0 ]; then
  [ -x "$work/build/outside_mpi" ] || { echo "find_package(Sirtaki) gave no Sirtaki::mpi, though there is a module for MPI"; exit 1; }
  bash "$here/../support/mpirun.sh" 2 "$work/build/outside_mpi"
  # has WHAT TEXT...: the output has these texts.
  has() {
    local what=$1 text
    shift
    for text in "$@"; do
      grep -qE -e "$text" "$work/output" || { echo "$what: no '$text' in the output"; cat "$work/output"; exit 1; }
    done
  }
  fails() { if "$@" >"$work/output" 2>&1; then echo "exit code 0: $*"; cat "$work/output"; exit 1; fi; }
  SIRTAKI_LOG_LEVEL=info bash "$here/../support/mpirun.sh" 2 "$work/build/outside" >"$work/output" 2>&1
  has "the log" "rank 1 of 2.*(Open MPI|MPICH|Intel).*(which the dynamic linker finds|beside what has launched this process)"
  SIRTAKI_LOG_LEVEL=info "$work/build/outside_mpi" >"$work/output" 2>&1
  has "a program with MPI" "which the program has"
  if grep -q "Open MPI v" "$work/output"; then other=mpich; else other=openmpi; fi
  SIRTAKI_LOG_LEVEL=info SIRTAKI_MPI_FAMILY=none "$work/build/outside" >"$work/output" 2>&1
  has "without MPI" "rank 0 of 1"
  fails env SIRTAKI_MPI_FAMILY=none bash "$here/../support/mpirun.sh" 2 "$work/build/outside"
  has "several ranks without MPI" "a launcher started 2 ranks .*, but the option mpi_family is none"
  fails env SIRTAKI_MPI_FAMILY=$other "$work/build/outside_mpi"
  has "another MPI than the program's" "the option mpi_family is for another MPI than the program has"
  mkdir "$work/aside"
  mv "${modules[@]}" "$work/aside"
  fails bash "$here/../support/mpirun.sh" 2 "$work/build/outside"
  has "no module" "this Sirtaki has no module for .*It has none at all"
  "$work/build/outside"
  mv "$work"/aside/* "$(dirname "${modules[0]}")"
fi
# The installed program finds LibTorch, and needs neither the library nor MPI.
"$work/prefix/bin/sirtaki-checkpoint" --help | diff "$here/../torch/checkpoint/tool/help.txt" -
if ldd "$work/prefix/bin/sirtaki-checkpoint" | grep -E "libmpi|libsirtaki"; then echo "sirtaki-checkpoint needs more than LibTorch"; exit 1; fi
if [ -x "$work/prefix/bin/sirtakirun" ]; then
  ctest --test-dir "$work/build" --output-on-failure --no-tests=error
fi
