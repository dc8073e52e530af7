#!/usr/bin/env bash
# A rank that is stopped (SIGSTOP): its process is there and its connections stand, but it does not
# answer. As good as lost. All runs at once.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"

if [ "${SIRTAKI_TEST_MEDIUM:-mpi}" = tcp ] && under_mpich; then
  echo 'SKIPPED: this mpirun waits for a stopped rank that has not called MPI' >&2
  exit 77
fi
options=(--sirtaki-ping-interval=0.5 --sirtaki-peer-timeout=12)
kinds=(stopped stopped-large)
for what in "${kinds[@]}"; do
  losing "$what, a leaf" "" 3 "$what" 2 "${options[@]}"
  losing "$what, the root of the tree" "" 3 "$what" 0 "${options[@]}"
done

# All ranks are stopped, rank 1 before the others, for longer than peer_timeout. Time in which a rank was stopped itself
# is no silence of the others: they go on together, until one is killed.
survive=$(flag_to_survive) || survive=
if [ -n "$survive" ]; then
  losing 'all, for a time' "$survive" 3 nobody-large 9 "${options[@]}"
  there() { [ "$(grep -c '^rank [012] is process' "$runs/all, for a time" 2>/dev/null)" = 3 ]; }
  within 90 there || fail 'the ranks do not begin'
  process_of() { sed -n "s/^rank $1 is process //p" "$runs/all, for a time"; }
  kill -STOP "$(process_of 1)"
  sleep 1
  kill -STOP "$(process_of 0)" "$(process_of 2)"
  sleep 13
  kill -CONT "$(process_of 1)" "$(process_of 0)" "$(process_of 2)"
  sleep 3   # six pings
  ! grep '^rank [012] after' "$runs/all, for a time" || fail 'they do not go on'
  kill -KILL "$(process_of 2)"
  lost 'all, for a time'
  expect 0 'rank 2 is lost'
  expect 1 'rank 2 is lost'
fi

for what in "${kinds[@]}"; do
  lost "$what, a leaf"
  expect 0 'rank 2 is lost'
  expect 1 'rank 2 is lost'
  lost "$what, the root of the tree"
  expect 1 'rank 0 is lost'
  expect 2 'rank 0 is lost'
done
