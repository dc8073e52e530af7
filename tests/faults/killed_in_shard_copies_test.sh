#!/usr/bin/env bash
# Ranks of an elastic job are killed while they exchange copies of shards: the others go on from the last ones that all had kept.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
[ -x "$bindir/lose_in_shard_copies" ] || { echo 'SKIPPED: built without LibTorch' >&2; exit 77; }
sirtakirun=${2:-}
[ -n "$sirtakirun" ] || { echo 'SKIPPED: built without sirtakirun' >&2; exit 77; }
program=lose_in_shard_copies

for place in keep receive; do
  output=$runs/$place
  code=0
  timeout --kill-after=10 150 "$sirtakirun" --elastic --flight-records "$runs/records" -np 4 --blacklist-cooldown-range 600,600 "$bindir/$program" "$place" \
    --sirtaki-ping-interval=0.5 --sirtaki-peer-timeout=12 2>&1 | sed -E 's/^\[[0-9]+\] //' >"$output" || code=$?
  left=3
  [ "$place" = keep ] || left=2
  [ "$code" = 0 ] || fail "$place: exit code $code"
  [ "$(grep -cE "^rank [0-9] of $left goes on from 4 of 4 ranks$" "$output")" = "$left" ] ||
    fail "$place: not all of $left ranks go on from the last shards that all have kept"
  [ "$(grep -cE '^sirtakirun: worker [0-9]+ on host .* died of SIGKILL$' "$output")" = $((4 - left)) ] ||
    fail "$place: not $((4 - left)) were killed"
  nothing_of_it_left
done
nothing_left
