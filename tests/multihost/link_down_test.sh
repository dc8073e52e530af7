#!/usr/bin/env bash
# A network that is gone while two hosts reduce together over TCP, and no launcher that tells of it: all ranks of both hosts
# name a rank of the other host, within peer_timeout and the time that a busy machine needs. SIRTAKI_TEST_MORE:
# that time, in milliseconds.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/support/processes.sh
. "$(dirname "$0")/../support/processes.sh"
# shellcheck source=tests/support/sample.sh
. "$(dirname "$0")/../support/sample.sh"
program=$(realpath "${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}/../faults/lose_a_rank")
limit=3000
more=${SIRTAKI_TEST_MORE:-10000}

hosts_up 2
output=$hosts_state/output
export SIRTAKI_SECRET=0123456789abcdef SIRTAKI_MEDIUM=tcp WORLD_SIZE=4 MASTER_ADDR=10.77.0.1
export SIRTAKI_PING_INTERVAL=0.5 SIRTAKI_PEER_TIMEOUT=3

in_bridge() { nsenter --target "${hosts_started[0]}" --net "$@"; }
link_down() { on_host 2 ip link set veth0 down; }
link_up() { on_host 2 ip link set veth0 up; }
# Both links are up, and nothing crosses.
silence_down() { in_bridge ip link set port2 nomaster; }
silence_up() { in_bridge ip link set port2 master bridge; }

all_begun() { [ "$(grep -c '^rank [0-3] is process' "$output")" = 4 ]; }
all_told() { [ "$(grep -c '^rank [0-3] after' "$output")" = 4 ]; }

# cut HOW WORK
cut() {
  local rank line took ranks=()
  printf '== %s, %s\n' "$1" "$2"
  : >"$output"
  for rank in 0 1 2 3; do
    RANK=$rank on_host $((rank / 2 + 1)) "$program" "$2" 9 >>"$output" 2>&1 &
    ranks+=($!)
  done
  hosts_wait 'not all ranks have begun' all_begun || fail "$(cat "$output")"
  "$1_down"
  hosts_wait 'not every rank was told' all_told || fail "$(cat "$output")"
  wait "${ranks[@]}" || true
  "$1_up"
  ! grep -E 'WRONG SUM|terminate called|sirtaki: bug' "$output" || fail 'a wrong result, or a crash'
  for rank in 0 1 2 3; do
    line=$(grep "^rank $rank after" "$output")
    printf '%s\n' "$line"
    grep -qE "rank [$([ "$rank" -lt 2 ] && echo 23 || echo 01)] is lost" <<<"$line" || fail 'it names no rank of the other host'
    took=${line#*after } took=${took%% ms*}
    [ "$took" -le $((limit + more)) ] || fail "it took $took ms"
  done
}

# shellcheck disable=SC2046  # several
for how in $(sample 2 link silence); do
  for work in $(sample 1 nobody-large nobody-small); do cut "$how" "$work"; done
done
