#!/usr/bin/env bash
# sirtakirun over ssh on three unlike hosts: who runs where, hosts chosen and left out, and hosts lost one after the other.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
run_hosts=3
# shellcheck source=tests/multihost/runs.sh
. "$(dirname "$0")/runs.sh"

# prints LINE...: the ranks have printed these and no others.
prints() { [ "$(sort "$output")" = "$(printf '%s\n' "$@")" ] || fail "expected: $*"; }
says() { grep -qE -- "$1" "$errors" || fail "it does not say: $1"; }

# shellcheck disable=SC2016  # the ranks expand it
tell='echo "$(hostname) $LOCAL_RANK/$LOCAL_WORLD_SIZE of $WORLD_SIZE $MASTER_ADDR"'

echo "--- unlike numbers of ranks"
run 0 -H h1:1,h2:2,h3:1 bash -c "$tell"
prints "[0] h1 0/1 of 4 10.77.0.1" "[1] h2 0/2 of 4 10.77.0.1" "[2] h2 1/2 of 4 10.77.0.1" "[3] h3 0/1 of 4 10.77.0.1"
run 0 -H h1:1,h2:2,h3:1 "$bindir/reductions" --gtest_filter='*TheLog*'

echo "--- hosts of a file, some left out, some chosen"
printf 'h1 slots=1 # here\nh2:2\nh3\n' >"$hosts_state/hostfile"
run 0 --hostfile "$hosts_state/hostfile" --exclude h2 bash -c "$tell"
prints "[0] h1 0/1 of 2 10.77.0.1" "[1] h3 0/1 of 2 10.77.0.1"
run 0 --hostfile "$hosts_state/hostfile" --exclude h1@h2:0 bash -c "$tell"
prints "[0] h2 0/1 of 2 10.77.0.2" "[1] h3 0/1 of 2 10.77.0.2"
run 0 --hostfile "$hosts_state/hostfile" --include h3@h2:1 bash -c "$tell"' $CUDA_VISIBLE_DEVICES'
prints "[0] h2 0/1 of 2 10.77.0.2 1" "[1] h3 0/1 of 2 10.77.0.2"

if [[ $hosts_mpi == *HYDRA* ]]; then
  echo "--- not under MPICH, whose mpiexec may end with a host that is lost: hosts lost one after the other"
  exit 0
fi
echo "--- hosts are lost one after the other, and those that are left start again"
begun() { [ "$(grep -c "^\[[0-9]\] begun $1\$" "$output")" = "$2" ]; }
lose() { kill -KILL "$(hosts_first "${hosts_started[$1]}")"; }
: >"$output"
start -H h1:1,h2:2,h3:1 --max-restarts 2 bash -c \
  'n=${TORCHELASTIC_RESTART_COUNT:-0}; echo "begun $n"; [ $n = 2 ] || exec sleep 300' &
job=$!
hosts_wait 'the ranks do not begin' begun 0 4 || fail 'the first time'
lose 3
hosts_wait 'the ranks do not begin again' begun 1 3 || fail 'the second time'
lose 2
code=0
wait "$job" || code=$?
[ "$code" = 0 ] || fail "code $code"
begun 2 1 || fail 'the third time'
says '^sirtakirun: rank 3 on host h3 was lost: '
says '^sirtakirun: starting again, 1 of 2, without h3$'
says '^sirtakirun: rank [12] on host h2 was lost: '
says '^sirtakirun: starting again, 2 of 2, without h3, h2$'
