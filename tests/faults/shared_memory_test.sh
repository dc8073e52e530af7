#!/usr/bin/env bash
# A rank is lost while the others wait for it over shared memory, in the midst of small operations: more ranks
# than cores, so that they sleep. All of them learn of it, and nothing stays behind. All runs at once.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
survive=$(flag_to_survive)

options=(--sirtaki-shared-memory=required --sirtaki-ping-interval=0.5 --sirtaki-peer-timeout=12)
for victim in 0 3; do
  losing "killed, rank $victim" "$survive" 4 killed-small $victim "${options[@]}"
  losing "stopped, rank $victim" "" 4 stopped-small $victim "${options[@]}"
done
for victim in 0 3; do
  for how in killed stopped; do
    lost "$how, rank $victim"
    for rank in 0 1 2 3; do
      [ $rank = $victim ] || expect $rank "rank $victim is lost"
    done
    nothing_of_it_left
  done
done
nothing_left
