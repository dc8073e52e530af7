#!/usr/bin/env bash
# A rank that is stopped (SIGSTOP): its process is there and its connections stand, but it does not
# answer. As good as lost. All runs at once.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"

options=(--sirtaki-ping-interval=0.5 --sirtaki-peer-timeout=12)
kinds=(stopped stopped-large)
for what in "${kinds[@]}"; do
  losing "$what, a leaf" "" 3 "$what" 2 "${options[@]}"
  losing "$what, the root of the tree" "" 3 "$what" 0 "${options[@]}"
done
for what in "${kinds[@]}"; do
  lost "$what, a leaf"
  expect 0 'rank 2 is lost'
  expect 1 'rank 2 is lost'
  lost "$what, the root of the tree"
  expect 1 'rank 0 is lost'
  expect 2 'rank 0 is lost'
done
