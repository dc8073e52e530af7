#!/usr/bin/env bash
# A program that another MPI's mpirun has started sees only itself: each rank refuses, with the reason.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"

for variable in OMPI_COMM_WORLD_SIZE PMI_SIZE WORLD_SIZE; do
  code=0
  # Started by nobody: an MPI program alone is a world of one.
  env -u OMPI_COMM_WORLD_SIZE -u PMI_SIZE -u MPI_LOCALNRANKS "$variable=4" \
    timeout -k 5 100 "$bindir/lose_a_rank" killed 0 >"$output" 2>&1 || code=$?
  [ "$code" -eq 2 ] || fail "$variable=4: code $code, expected 2"
  grep "$variable=4" "$output" || fail "$variable=4: the text does not name it"
  grep -q 'mpirun that belongs to the MPI' "$output" || fail "$variable=4: the text does not say what to do"
done
