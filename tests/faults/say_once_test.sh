#!/usr/bin/env bash
# A fault is told once: by the exception, or, if nothing has thrown it, by a warning at the end.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
[ -x "$bindir/say_once" ] || { echo 'SKIPPED: built without LibTorch' >&2; exit 77; }

# run RANKS WHAT: whatever mpirun returns, for MPI is not finalized after a fault.
run() {
  local code=0
  SIRTAKI_LOG_LEVEL=${level:-warning} SIRTAKI_TEST_SECONDS=100 \
    bash "$here/../support/mpirun.sh" "$1" "$bindir/say_once" "$2" >"$output" 2>&1 || code=$?
  case $code in 124 | 137) fail "say_once $2: does not end" ;; esac
}

run 2 caught
grep 'caught: aborted: loss is not a number (from rank 0 on host ' "$output" || fail 'nothing was thrown'
! grep -q 'warning.*loss is not a number' "$output" || fail 'told twice'
level=debug run 1 caught
grep 'debug.*shutdown: aborted: loss is not a number' "$output" || fail 'not even for debugging'

for what in shutdown exit; do
  run 1 "$what"
  grep 'warning.*shutdown: aborted: loss is not a number' "$output" || fail "$what: nobody was told"
done
