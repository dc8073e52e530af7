#!/usr/bin/env bash
# A network that is gone while two hosts reduce together over TCP, and no launcher that tells of it: all ranks of both hosts
# name a rank of the other host, within peer_timeout and the time that a busy machine needs. Then the link between two of three
# hosts is cut, neither of which has rank 0: all ranks name both hosts. SIRTAKI_TEST_MORE: that time, in milliseconds.
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

hosts_up 3
output=$hosts_state/output
export SIRTAKI_SECRET=0123456789abcdef SIRTAKI_MEDIUM=tcp MASTER_ADDR=10.77.0.1
export SIRTAKI_PING_INTERVAL=0.5 SIRTAKI_PEER_TIMEOUT=3

in_bridge() { nsenter --target "${hosts_started[0]}" --net "$@"; }
link_down() { on_host 2 ip link set veth0 down; }
link_up() { on_host 2 ip link set veth0 up; }
# Both links are up, and nothing crosses.
silence_down() { in_bridge ip link set port2 nomaster; }
silence_up() { in_bridge ip link set port2 master bridge; }
# Both reach host 1, and not each other.
between_down() { isolate on; }
between_up() { isolate off; }
isolate() {
  local port
  for port in port2 port3; do in_bridge ip link set "$port" type bridge_slave isolated "$1"; done
}

all_begun() { [ "$(grep -c '^rank [0-9] is process' "$output")" = "$WORLD_SIZE" ]; }
all_told() { [ "$(grep -c '^rank [0-9] after' "$output")" = "$WORLD_SIZE" ]; }

# cut HOW WORK HOST...: by rank, where it runs
cut() {
  local rank line took lost ranks=() hosts=("${@:3}")
  export WORLD_SIZE=${#hosts[@]}
  printf '== %s, %s\n' "$1" "$2"
  : >"$output"
  for rank in "${!hosts[@]}"; do
    RANK=$rank on_host "${hosts[rank]}" "$program" "$2" 9 >>"$output" 2>&1 &
    ranks+=($!)
  done
  hosts_wait 'not all ranks have begun' all_begun || fail "$(cat "$output")"
  "$1_down"
  hosts_wait 'not every rank was told' all_told || fail "$(cat "$output")"
  wait "${ranks[@]}" || true
  "$1_up"
  ! grep -E 'WRONG SUM|terminate called|sirtaki: bug' "$output" || fail 'a wrong result, or a crash'
  for rank in "${!hosts[@]}"; do
    line=$(grep "^rank $rank after" "$output")
    printf '%s\n' "$line"
    lost="rank [$([ "${hosts[rank]}" = 1 ] && echo 23 || echo 01)] is lost"
    if [ "$1" = between ]; then
      lost='rank (1 is lost: host h2 .* that rank 2 on host h3|2 is lost: host h3 .* that rank 1 on host h2) has sent'
    fi
    grep -qE "$lost" <<<"$line" || fail "it does not say: $lost"
    took=${line#*after } took=${took%% ms*}
    [ "$took" -le $((limit + more)) ] || fail "it took $took ms"
  done
}

# shellcheck disable=SC2046  # several
for how in $(sample 2 link silence); do
  for work in $(sample 1 nobody-large nobody-small); do cut "$how" "$work" 1 1 2 2; done
done
cut between nobody-large 1 2 3   # small ones do not cross that link
