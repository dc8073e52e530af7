#!/usr/bin/env bash
# A rank that is killed while hosts reduce together: every other one, of its host and of the others, gets the error that
# names it.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/support/sample.sh
. "$(dirname "$0")/../support/sample.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}/../faults

# Open MPI 4.1 may end a survivor by itself when a peer of another host dies, or block it in its own calls: then the
# others name that one, or it says so itself a little later.
says() {
  local lost="rank $2 is lost|rank [0-9] is lost: its process, [0-9]+, has ended"
  grep -qE "^rank $1 after ([0-9]{1,5} ms: .*($lost)|[0-9]{1,5} ms: .*has been stuck in one call)" "$output" ||
    grep -qE "rank $1 is lost: its process, [0-9]+, has ended" "$output"
}
# Open MPI may also end one survivor so late that nobody is left to name it.
state_of() { on_host $(($1 / 2 + 1)) cat "/proc/$(sed -n "s/^rank $1 is process //p" "$output")/status"; }
all_say() {
  local rank silent=0
  for rank in 0 1 2 3; do
    [ "$rank" = "$1" ] || says "$rank" "$1" && continue
    ! state_of "$rank" | grep -q '^State:[[:space:]]*[^Z[:space:]]' || return 1
    silent=$((silent + 1))
  done
  [ "$silent" -le 1 ]
}

hosts_not_under HYDRA 'this mpirun ends all ranks when one dies'
hosts_not_under '(Open MPI) 5.' 'this MPI aborts a process whose peer on another host is gone'
hosts_up 2
# This mpirun then waits for ever: what counts is what the ranks say.
export SIRTAKI_MPIRUN_FLAGS=--enable-recovery SIRTAKI_TEST_SECONDS=200
for victim in $(sample 1 1 2); do
  printf '== rank %s\n' "$victim"
  output=$hosts_state/output.$victim   # the mpirun before may still write
  : >"$output"
  across h1:2,h2:2 "$bindir/lose_a_rank" killed-large "$victim" --sirtaki-ping-interval=0.5 \
    --sirtaki-peer-timeout=12 >"$output" 2>&1 &
  job=$!
  hosts_wait 'not every rank was told' all_say "$victim" || {
    cat "$output"
    for rank in 0 1 2 3; do state_of "$rank" | grep -E '^(State|Pid|Threads|SigCgt)' || printf 'rank %s is gone\n' "$rank"; done
    exit 1
  }
  grep '^rank' "$output"
  if grep -E 'WRONG SUM|Segmentation|terminate called|sirtaki: bug' "$output"; then exit 1; fi
  kill "$job" && wait "$job" 2>/dev/null || true
done
