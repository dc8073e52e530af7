#!/usr/bin/env bash
# soak.sh FOLDER-OF-THE-PROGRAMS [RUNS [RUNS]]: train_digits again and again on two hosts, one with one rank and one with two (200
# runs), and on three hosts (50), while half of the cores are busy with something else. Every run must end, and its parameters
# must be those of a run that nothing disturbs, to the bit.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/support/processes.sh
. "$(dirname "$0")/../support/processes.sh"
bindir=${1:?usage: bash soak.sh FOLDER-OF-THE-PROGRAMS [RUNS [RUNS]]}
sirtakirun=$(realpath "$bindir/../../sirtakirun")
program=$(realpath "$bindir/../../examples/train_digits")
hosts_up 3
output=$hosts_state/output
busy=()
trap 'kill "${busy[@]}" 2>/dev/null || true; hosts_down' EXIT

# digest_on HOSTS WHICH: trains, and sets `digest` to that of the parameters
digest_on() {
  on_host 1 timeout -k 5 250 "$sirtakirun" -H "$1" --ssh-args "-F $hosts_state/ssh_config" --network-interfaces veth0 \
    "${hosts_flags[@]}" "$program" --epochs 3 --sirtaki-deterministic=true --sirtaki-intra-op-threads=1 >"$output" 2>&1 </dev/null ||
    fail "$2 on $1: code $?"
  digest=$(sed -n 's/^\[0\] parameters identical on all ranks, digest //p' "$output")
  [ -n "$digest" ] || fail "$2 on $1 tells no digest"
}

# soak RUNS HOSTS DIGEST
soak() {
  local longest=0 run begin
  for ((run = 1; run <= $1; ++run)); do
    begin=$SECONDS
    digest_on "$2" "run $run"
    [ "$digest" = "$3" ] || fail "run $run on $2: $digest, undisturbed $3"
    ((longest = SECONDS - begin > longest ? SECONDS - begin : longest)) || true
  done
  echo "$2: $1 of $1 runs ended, within $longest s, with digest $3"
}

two=h1:1,h2:2
three=h1:1,h2:1,h3:1
digest_on $two 'the undisturbed run'
of_two=$digest
digest_on $three 'the undisturbed run'
of_three=$digest
for ((i = 0; i < ($(nproc) + 1) / 2; ++i)); do
  while :; do :; done &
  busy+=($!)
done
soak "${2:-200}" $two "$of_two"
soak "${3:-50}" $three "$of_three"
