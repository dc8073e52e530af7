#!/usr/bin/env bash
# MPI may be finalized by the thread that initialised it alone. If that has ended, the end of the process
# leaves MPI as it is and says so, instead of risking a hang.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"

# Without mpirun, which would count the missing MPI_Finalize as a failure of the job.
code=0
timeout -k 5 100 "$bindir/init_in_a_thread" >"$output" 2>&1 || code=$?
[ "$code" -eq 0 ] || fail "code $code"
grep 'MPI_Finalize is skipped: the process exits on another thread' "$output" || fail 'nothing was said'
