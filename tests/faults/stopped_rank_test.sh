#!/usr/bin/env bash
# A rank that is stopped (SIGSTOP): its process is there and its connections stand, but it does not
# answer. As good as lost. All runs at once.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"

options=(--sirtaki-ping-interval=0.5 --sirtaki-peer-timeout=5)
kinds=(stopped stopped-large)
for what in "${kinds[@]}"; do
  losing "$what, a leaf" "" 3 "$what" 2 "${options[@]}"
  losing "$what, the root of the tree" "" 3 "$what" 0 "${options[@]}"
done
for what in "${kinds[@]}"; do
  lost "$what, a leaf"
  # The first to end takes the job along, so only one is sure to say something.
  grep -qE '^rank [01] after' "$output" || fail 'no rank noticed'
  for rank in 0 1; do
    ! grep -q "^rank $rank after" "$output" || expect $rank 'rank 2 is lost'
  done
  lost "$what, the root of the tree"
  grep -qE '^rank [12] after' "$output" || fail 'no rank noticed'
  for rank in 1 2; do
    ! grep -q "^rank $rank after" "$output" || expect $rank 'rank 0 is lost'
  done
done
