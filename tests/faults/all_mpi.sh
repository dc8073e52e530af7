#!/usr/bin/env bash
# all_mpi.sh FOLDER-OF-THE-PROGRAMS: the tests of lost ranks with the engines' messages over MPI, as between
# hosts: one of them, or with SIRTAKI_TEST_SCALE=full all.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/support/sample.sh
. "$here/../support/sample.sh"
export SIRTAKI_TRANSPORT=mpi
for test in $(sample 1 killed_rank stopped_rank absent_rank killed_in_a_call shared_memory); do
  printf '== %s\n' "$test"
  bash "$here/${test}_test.sh" "$@"
done
