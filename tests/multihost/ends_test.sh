#!/usr/bin/env bash
# Ends of a run of real ranks, on two hosts of two over ssh and on one host of four: three by seed, or with
# SIRTAKI_TEST_SCALE=full every one. See ends.sh.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/support/sample.sh
. "$(dirname "$0")/../support/sample.sh"
# shellcheck source=tests/multihost/ends.sh
. "$(dirname "$0")/ends.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}
ends_need "$bindir"
hosts_not_under HYDRA 'MPICH leaves shared memory of ranks that are killed'
ends_up

# unplug WORDS PROGRAM...: the link of host 2 goes down. Its ranks end by themselves.
unplug() {
  local words=$1
  shift
  begin "$@"
  on_host 2 ip link set veth0 down
  finish 1
  says "$words"
  clean
  on_host 2 ip link set veth0 up
}
link_down() { unplug '(rank [23] on host h2 was lost: |first fault: peer lost: rank [23] is lost: )' "$program" waits -1; }
link_down_without_sirtaki() {
  unplug 'rank [23] on host h2 was lost: ' "$(realpath "$bindir/../faults/only_mpi")"
}

hosts=(-H h1:2,h2:2 --ssh-args "-F $hosts_state/ssh_config" --network-interfaces veth0)
# shellcheck disable=SC2046  # several
trials 'two hosts' $(sample 2 killed stopped throws exits interrupted terminated link_down link_down_without_sirtaki)
hosts=(-np 4 --oversubscribe) per_host=4
# shellcheck disable=SC2046  # several
trials 'one host' $(sample 1 terminated interrupted exits throws stopped killed)
exit "$failed"
