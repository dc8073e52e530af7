#!/usr/bin/env bash
# soak.sh FOLDER-OF-THE-PROGRAMS [RUNS [RUNS]]: train_digits again and again on two hosts, one with one rank and one with two (200
# runs), and on three hosts (50), while half of the cores are busy with something else. Every run must end, and its parameters
# must be those of the first, to the bit.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
bindir=${1:?usage: bash soak.sh FOLDER-OF-THE-PROGRAMS [RUNS [RUNS]]}
sirtakirun=$(realpath "$bindir/../../sirtakirun")
program=$(realpath "$bindir/../../examples/train_digits")
hosts_up 3
output=$hosts_state/output
busy=()
trap 'kill "${busy[@]}" 2>/dev/null || true; hosts_down' EXIT
for ((i = 0; i < ($(nproc) + 1) / 2; ++i)); do
  while :; do :; done &
  busy+=($!)
done

# soak RUNS HOSTS
soak() {
  local first='' longest=0 run begin digest
  for ((run = 1; run <= $1; ++run)); do
    begin=$SECONDS
    on_host 1 timeout -k 5 250 "$sirtakirun" -H "$2" --ssh-args "-F $hosts_state/ssh_config" --network-interfaces veth0 \
      "${hosts_flags[@]}" "$program" --epochs 3 --sirtaki-deterministic=true --sirtaki-intra-op-threads=1 >"$output" 2>&1 </dev/null ||
      fail "run $run on $2: code $?"
    digest=$(sed -n 's/^\[0\] parameters identical on all ranks, digest //p' "$output")
    [ -n "$digest" ] || fail "run $run on $2 tells no digest"
    [ "${first:=$digest}" = "$digest" ] || fail "run $run on $2: $digest, in run 1 $first"
    ((longest = SECONDS - begin > longest ? SECONDS - begin : longest)) || true
  done
  echo "$2: $1 of $1 runs ended, within $longest s, with digest $first"
}
soak "${2:-200}" h1:1,h2:2
soak "${3:-50}" h1:1,h2:1,h3:1
