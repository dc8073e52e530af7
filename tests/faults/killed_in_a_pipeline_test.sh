#!/usr/bin/env bash
# A rank of a pipeline is killed in a forward pass, in a backward pass, before tied parameters are summed, or in an
# evaluation: every other one gets an error that names it and says with which stage, for what and for whom it waited.
# One of these by seed for each victim; with SIRTAKI_TEST_SCALE=full all, four at once.
#   SIRTAKI_TEST_SEED    the seed that a failing test printed
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
[ -x "$bindir/lose_in_a_pipeline" ] || { echo 'SKIPPED: built without LibTorch' >&2; exit 77; }
survive=$(flag_to_survive)
program=lose_in_a_pipeline
launch=("$bindir/$program")
RANDOM=${SIRTAKI_TEST_SEED:=$SRANDOM}
printf 'seed %s\n' "$SIRTAKI_TEST_SEED"

runs_of=()   # "PLACE VICTIM"
for victim in 0 1 2; do
  places=(forward backward tied evaluate)
  if [ "${SIRTAKI_TEST_SCALE:-}" != full ]; then places=("${places[RANDOM % ${#places[@]}]}"); fi
  for place in "${places[@]}"; do runs_of+=("$place $victim"); done
done

names_its_stage() {
  local rank
  for rank in 0 1 2; do
    [ $rank -eq "$1" ] || expect $rank "stage $rank on rank $rank waits (for|until) .*: .*rank $1 is lost"
  done
  grep -qE "^rank [0-9] after .* stage $1 on rank $1( takes|: | over)" "$output" || fail "nobody says that it waits for stage $1"
}
losing_each 4 3 names_its_stage --sirtaki-ping-interval=0.5 --sirtaki-peer-timeout=12
