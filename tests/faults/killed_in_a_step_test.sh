#!/usr/bin/env bash
# A rank is killed in the middle of a sharded step, before its ranks meet, while its shards are written and behind
# that: every other one gets the error that names it from step(), and from each step() after that, and ends. Four of
# these by seed, one for each way of sharding; with SIRTAKI_TEST_SCALE=full all, five at once.
#   SIRTAKI_TEST_SEED    the seed that a failing test printed
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
[ -x "$bindir/lose_in_a_step" ] || { echo 'SKIPPED: built without LibTorch' >&2; exit 77; }
survive=$(flag_to_survive)
program=lose_in_a_step
launch=("$bindir/$program")
RANDOM=${SIRTAKI_TEST_SEED:=$SRANDOM}
printf 'seed %s\n' "$SIRTAKI_TEST_SEED"

runs_of=()   # "PLACE SHARD COMMON VICTIM"
for common in common own; do
  for shard in optimizer gradients; do
    places=(before halfway stepped gather)
    if [ $common = common ]; then places+=(meeting moving); fi
    if [ "${SIRTAKI_TEST_SCALE:-}" != full ]; then places=("${places[RANDOM % ${#places[@]}]}"); fi
    for place in "${places[@]}"; do runs_of+=("$place $shard $common $((RANDOM % 3))"); done
  done
done

is_named() {
  local rank
  for rank in 0 1 2; do
    [ $rank -eq "$1" ] || expect $rank "rank $1 is lost"
  done
}
losing_each 5 3 is_named --sirtaki-ping-interval=0.5 --sirtaki-peer-timeout=12
