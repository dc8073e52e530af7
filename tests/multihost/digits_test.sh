#!/usr/bin/env bash
# train_digits over ssh: on two hosts of two ranks, and on three hosts of which one is lost and left out.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/support/processes.sh
. "$(dirname "$0")/../support/processes.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}
sirtakirun=$bindir/../../sirtakirun
program=$bindir/../../examples/train_digits
for needed in "$sirtakirun" "$program"; do
  [ -x "$needed" ] || hosts_skip "$(basename "$needed") is not built"
done
sirtakirun=$(realpath "$sirtakirun")
program=$(realpath "$program")

hosts_up 3
output=$hosts_state/output
errors=$hosts_state/errors
launcher=(--launcher "${MPIEXEC:-$(command -v mpirun)}")
over_ssh=(--ssh-args "-F $hosts_state/ssh_config" --network-interfaces veth0 "${hosts_flags[@]}")
# Every host has as many threads, which sum up in one order.
same=(--sirtaki-deterministic=true --sirtaki-intra-op-threads=1)

start() { on_host 1 timeout -k 5 250 "$sirtakirun" "${launcher[@]}" "$@" >"$output" 2>"$errors" </dev/null; }

# train FLAG... -- ARGUMENT...: sirtakirun's flags, and train_digits' arguments.
train() {
  local flags=()
  while [ "$1" != -- ]; do flags+=("$1") && shift; done
  shift
  start "${flags[@]}" "$program" "$@" || fail "sirtakirun ${flags[*]} train_digits $*: code $?"
}

# says PATTERN FILE
says() { grep -qE -- "$1" "$2" || fail "$(basename "$2") does not say: $1"; }
accuracy() { sed -n 's/^\[0\] test accuracy: \([0-9.]*\) %$/\1/p' "$output"; }
digest() { sed -n 's/^\[0\] parameters identical on all ranks, digest //p' "$output"; }
is_good() { awk -v accuracy="$(accuracy)" 'BEGIN { exit !(accuracy >= 95) }' || fail "the accuracy is $(accuracy) %"; }

echo "--- two hosts of two ranks"
train -H h1:2,h2:2 "${over_ssh[@]}" -- --epochs 12
says '^\[0\] 1433 training and 364 test samples; 4 ranks' "$output"
is_good
two_hosts=$(accuracy)

echo "--- one host of four"
train -np 4 --oversubscribe -- --epochs 12
is_good
awk -v a="$two_hosts" -v b="$(accuracy)" 'BEGIN { exit !(a - b < 2 && b - a < 2) }' ||
  fail "$two_hosts % on two hosts, $(accuracy) % on one"

echo "--- two ranks, on two hosts and on one: the same to the bit"
train -H h1:1,h2:1 "${over_ssh[@]}" -- --epochs 2 "${same[@]}"
two_hosts="$(accuracy) $(digest)"
train -np 2 --oversubscribe -- --epochs 2 "${same[@]}"
[ "$two_hosts" = "$(accuracy) $(digest)" ] || fail "$two_hosts on two hosts, $(accuracy) $(digest) on one"

echo "--- three hosts, unlike ones; one is lost, and the others go on from the checkpoint"
: >"$output"
# The first run would take long; the second stops after some epochs.
start -H h1:1,h2:2,h3:1 "${over_ssh[@]}" --max-restarts 1 bash -c 'exec "$@" ${TORCHELASTIC_RESTART_COUNT:+--stop-after 12}' train \
  "$program" --epochs 10000 --checkpoint "$hosts_state/checkpoint" --resume &
job=$!
hosts_wait 'it does not train' grep -qE 'epoch +3/10000' "$output" || fail 'no third epoch'
on_host 3 ip link set veth0 down
code=0
wait "$job" || code=$?
[ "$code" = 0 ] || fail "code $code"
says '^sirtakirun: rank 3 on host h3 was lost: ' "$errors"
says '^sirtakirun: starting again, 1 of 1, without h3$' "$errors"
says '^\[0\] no checkpoint yet: from the beginning$' "$output"
says '^\[0\] resumed after epoch ([2-9]|[1-9][0-9]), at a learning rate of ' "$output"   # the third's may not have been written
says '^\[0\] 1433 training and 364 test samples; 3 ranks' "$output"
says '^\[0\] epoch +[0-9]+/10000' "$output"
is_good
h3_is_idle() {
  local names
  names=$(on_host 3 sh -c 'cat /proc/[0-9]*/comm; true') && ! grep -qxE 'train_digits|sirtakirun|orted' <<<"$names"
}
hosts_wait 'the lost host goes on' h3_is_idle || fail 'left running on h3'
