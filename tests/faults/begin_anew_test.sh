#!/usr/bin/env bash
# A program that has gone on after a fault, and then ended in order, has ended well: for mpirun too, which would otherwise
# end the ranks that take longer, and for sirtakirun. Not so where large vectors go over MPI, as a fault may then leave a
# thread within a call.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"

export SIRTAKI_FLIGHT_RECORDS=off

rounds=5
# begin_anew RANKS [OPTION...]: by mpirun.
begin_anew() {
  local ranks=$1 code=0
  shift
  SIRTAKI_LOG_LEVEL=warning SIRTAKI_TEST_SECONDS=200 bash "$here/../support/mpirun.sh" "$ranks" "$bindir/begin_anew" \
    $((ranks - 1)) "$rounds" "$@" >"$output" 2>&1 || code=$?
  [ "$code" = 0 ] || fail "begin_anew on $ranks ranks, $*: exit code $code"
  [ "$(grep -c 'is through$' "$output")" = "$ranks" ] || fail "not all ranks are through"
  ! grep -q WRONG "$output" || fail "wrong"
  ! grep -q '^rank [0-9]* keeps' "$output" || fail "begin_anew on $ranks ranks, $*: what a round had stays"
}
for ranks in 2 3; do begin_anew "$ranks"; done
begin_anew 2 --sirtaki-transport=mpi

if [ $# -gt 1 ]; then   # sirtakirun
  code=0
  SIRTAKI_LOG_LEVEL=warning timeout 200 "$2" -np 2 --oversubscribe "$bindir/begin_anew" 1 3 >"$output" 2>&1 || code=$?
  [ "$code" = 0 ] || fail "begin_anew by sirtakirun: exit code $code"
  [ "$(grep -c 'is through$' "$output")" = 2 ] || fail "not all ranks are through"
fi

# Over TCP nothing stays of what a round had: in shared memory, without it, and between hosts.
export SIRTAKI_TEST_MEDIUM=tcp
rounds=60
[ "${SIRTAKI_TEST_SCALE:-small}" != full ] || rounds=200
begin_anew 2
begin_anew 2 --sirtaki-shared-memory=off
if unshare --uts true 2>/dev/null; then
  SIRTAKI_TEST_HOSTS=2 begin_anew 4
fi
