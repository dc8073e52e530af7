#!/usr/bin/env bash
# A rank that is killed: every other one gets the error that names it. All runs at once.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
survive=$(flag_to_survive)

# Asked after half a second of silence, and lost 12 s after that: a rank that a busy machine holds up is not taken for lost.
# The end of a process on this host is noticed long before that.
limit=6000
options=(--sirtaki-ping-interval=0.5 --sirtaki-peer-timeout=12)
kinds=(killed exits killed-large killed-paused)
for what in "${kinds[@]}"; do
  losing "$what, a leaf" "$survive" 3 "$what" 2 "${options[@]}"
  losing "$what, the root of the tree" "$survive" 3 "$what" 0 "${options[@]}"
done
for what in "${kinds[@]}"; do
  lost "$what, a leaf"
  expect 0 'rank 2 is lost'
  expect 1 'rank 2 is lost'
  lost "$what, the root of the tree"
  expect 1 'rank 0 is lost'
  expect 2 'rank 0 is lost'
done
