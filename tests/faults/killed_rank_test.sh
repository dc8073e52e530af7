#!/usr/bin/env bash
# A rank that is killed: every other one gets the error that names it, within the configured time.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
survive=$(flag_to_survive)

# Asked after half a second of silence, and lost 2 s after that; the rest is for a slow machine.
options=(--sirtaki-ping-interval=0.5 --sirtaki-peer-timeout=2)
limit=8000

for what in killed exits killed-large; do
  printf '== %s: a leaf\n' "$what"
  lose "$survive" 3 "$what" 2 "${options[@]}"
  expect 0 'rank 2 is lost' $limit
  expect 1 'rank 2 is lost' $limit
  printf '== %s: the root of the tree\n' "$what"
  lose "$survive" 3 "$what" 0 "${options[@]}"
  expect 1 'rank 0 is lost' $limit
  expect 2 'rank 0 is lost' $limit
done
