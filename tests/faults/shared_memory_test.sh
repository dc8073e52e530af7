#!/usr/bin/env bash
# A rank is lost while the others wait for it over shared memory, in the midst of small operations: more ranks
# than cores, so that they sleep. All of them learn of it, and nothing stays behind.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
survive=$(flag_to_survive)

options=(--sirtaki-shared-memory=required --sirtaki-ping-interval=0.5 --sirtaki-peer-timeout=2)
limit=8000

for victim in 0 3; do
  printf '== killed: rank %s\n' $victim
  lose "$survive" 4 killed-small $victim "${options[@]}"
  for rank in 0 1 2 3; do
    [ $rank = $victim ] || expect $rank "rank $victim is lost" $limit
  done
  nothing_left
  printf '== stopped: rank %s\n' $victim
  lose "" 4 stopped-small $victim "${options[@]}"
  # The first to end takes the job along, so only one is sure to say something.
  grep -qE '^rank [0-9] after' "$output" || fail 'no rank noticed'
  for rank in 0 1 2 3; do
    ! grep -q "^rank $rank after" "$output" || expect $rank "rank $victim is lost" $limit
  done
  nothing_left
done
