#!/usr/bin/env bash
# Ranks are killed, or end, while a checkpoint is written behind: the one before loads, or the new one where that was
# to be there; whole, to the bit. The run goes on from it, and its next save leaves no files of the one that was lost.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
[ -x "$bindir/lose_in_a_save" ] || { echo 'SKIPPED: built without LibTorch' >&2; exit 77; }
survive=$(flag_to_survive)
program=lose_in_a_save
launch=("$bindir/$program")
scratch=$(mktemp -d)
trap 'clean_up; rm -rf "$scratch"' EXIT

declare -A steps=(['shard 0']=2 ['shard 1']=2 ['file 0']=2 ['folder 0']=4 ['exits 0']=4 ['fails 0']=24)
for run in "${!steps[@]}"; do
  mkdir "$scratch/${run/ /_}"
  losing "$run" "$survive" 2 "${run% *}" "$scratch/${run/ /_}/run.pt" "${run#* }" \
    --sirtaki-ping-interval=0.5 --sirtaki-peer-timeout=12
done
for run in "${!steps[@]}"; do
  lost "$run"
  case $run in
    exits* | fails*) ;;
    *) expect $((1 - ${run#* })) "rank ${run#* } is lost" ;;
  esac
  nothing_of_it_left
done
for run in "${!steps[@]}"; do losing "$run, again" "" 2 load "$scratch/${run/ /_}/run.pt" "${steps[$run]}"; done
for run in "${!steps[@]}"; do
  lost "$run, again"
  [ "$(cat "$output.code")" = 0 ] || fail "its run that goes on ends with code $(cat "$output.code")"
  for rank in 0 1; do
    grep -E "^rank $rank goes on from [${steps[$run]}]$" "$output" || fail "rank $rank does not go on"
  done
done
nothing_left
