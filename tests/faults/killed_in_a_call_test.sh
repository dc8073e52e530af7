#!/usr/bin/env bash
# Ranks are killed and stopped at random moments inside collectives over shared memory. Each time all others
# get an error that names the lost rank, and end; no result is wrong; nothing stays behind.
#   SIRTAKI_TEST_KILLS   how many ranks are lost (5)
#   SIRTAKI_TEST_SEED    the seed that a failing test printed
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
survive=$(flag_to_survive)
program=lose_in_a_call
# shellcheck disable=SC2016  # for the other shell
launch=(bash -c '"$0" "$@"; echo "a rank ended with code $?"' "$bindir/$program")

kinds=(all-reduce-pool all-reduce-private all-reduce-small all-reduce-large all-gather broadcast
  reduce-scatter all-to-all together)
losses=${SIRTAKI_TEST_KILLS:-5}
RANDOM=${SIRTAKI_TEST_SEED:=$SRANDOM}
printf 'seed %s\n' "$SIRTAKI_TEST_SEED"
first_kind=$((RANDOM % ${#kinds[@]}))

# MPI's files of a run, too.
scratch=$(mktemp -d)
trap 'clean_up; rm -rf "$scratch"' EXIT
export TMPDIR=$scratch

# Nothing of the memory that the ranks shared is mapped or open any more.
no_memory_left() {
  local left
  sed -n 's/^rank [0-9]* shares memory \([0-9]*\)$/\1/p' "$output" | sort >"$scratch/shared"
  [ -s "$scratch/shared" ] || fail 'the ranks shared no memory'
  {
    sed -nE 's,.* ([0-9]+) +/memfd:sirtaki .*,\1,p' /proc/[0-9]*/maps
    find /proc/[0-9]*/fd -lname '/memfd:sirtaki *' -exec stat -L -c %i {} +
  } 2>/dev/null | sort -u >"$scratch/there" || true  # processes come and go
  left=$(comm -12 "$scratch/shared" "$scratch/there")
  [ -z "$left" ] || fail "shared memory is left: $left"
}

# ended COUNT CODE: so many ranks have.
ended() {
  local count
  count=$(grep -cx "a rank ended with code $2" "$output") || true
  [ "$count" -eq "$1" ] || fail "$count ranks ended with code $2, expected are $1"
}

# begin and finish: of the loss of this number, five at once.
begin() {
  kind[$1]=${kinds[(first_kind + $1) % ${#kinds[@]}]}
  ranks[$1]=$((2 + ($1 + $1 / ${#kinds[@]}) % 3))
  victim[$1]=$((RANDOM % ranks[$1]))
  how[$1]=killed
  if [ $(($1 % at_once)) -eq 4 ]; then how[$1]=stopped; fi
  # Two of Open MPI's mpirun that begin at once must not make the same folder: one of them would fail.
  mkdir "$scratch/run$1"
  TMPDIR=$scratch/run$1 losing "$1" "$survive" "${ranks[$1]}" "${how[$1]}" "${kind[$1]}" "${victim[$1]}" "$RANDOM" "$scratch/board$1" \
    --sirtaki-shared-memory=required --sirtaki-ping-interval=0.2 --sirtaki-peer-timeout=12
}
finish() {
  local rank of=${ranks[$1]} lost=${victim[$1]}
  lost "$1"
  printf '%s: rank %s of %s, in %s%s\n' "${how[$1]}" "$lost" "$of" "${kind[$1]}" \
    "$(grep -q '^lost inside the call$' "$output" || echo ', as it ended')"
  for ((rank = 0; rank < of; ++rank)); do
    [ $rank -eq "$lost" ] || expect $rank "rank $lost is lost"
  done
  if [ "${how[$1]}" = killed ]; then
    ended 1 137
    ended $((of - 1)) 3
  else
    expect "$lost" "rank $lost is lost"  # it was woken when the others had their errors
    ended "$of" 3
  fi
  nothing_of_it_left
  no_memory_left
}

at_once=5
declare -a kind ranks victim how
for ((first = 0; first < losses; first += at_once)); do
  for ((loss = first; loss < first + at_once && loss < losses; ++loss)); do begin "$loss"; done
  for ((loss = first; loss < first + at_once && loss < losses; ++loss)); do finish "$loss"; done
done
nothing_left
left=$(find "$scratch" -type f ! -name 'board*' ! -name shared ! -name there)
[ -z "$left" ] || fail "files are left: $left"
