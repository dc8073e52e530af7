#!/usr/bin/env bash
# An elastic job on two hosts of two ranks: one host comes later, a rank is killed, a host loses all its processes, its link goes
# down, its name leaves the list of the hosts and comes back, two hosts do not reach each other, and sirtakirun is killed. The others
# train on each time, and all are there in the end.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/support/processes.sh
. "$(dirname "$0")/../support/processes.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}
sirtakirun=$bindir/../../sirtakirun
program=$bindir/../python/sirtaki_elastic_twin
for needed in "$sirtakirun" "$program"; do
  [ -x "$needed" ] || hosts_skip "$(basename "$needed") is not built"
done
sirtakirun=$(realpath "$sirtakirun")
program=$(realpath "$program")

hosts_up 3
output=$hosts_state/output
printf '#!/bin/sh\ncat %s/list\n' "$hosts_state" >"$hosts_state/find.sh"
chmod +x "$hosts_state/find.sh"
list() { printf '%s\n' "$@" >"$hosts_state/list.new" && mv "$hosts_state/list.new" "$hosts_state/list"; }
list h1:2

# begin FLAG...: an elastic job in the background. end_well: ends it.
begin() {
  rm -f "$hosts_state/enough"
  : >"$output"   # not as late as the job opens it: the job before has printed the same lines
  mark=0
  on_host 1 "$sirtakirun" --elastic "$@" --flight-records "$hosts_state/records" --ssh-args "-F $hosts_state/ssh_config" \
    --network-interfaces veth0 "$program" "$hosts_state/enough" >"$output" 2>&1 </dev/null &
  job=$!
}
end_well() {
  local code=0
  touch "$hosts_state/enough"
  wait "$job" || code=$?
  [ "$code" = 0 ] || fail "exit code $code"
}
begin --host-discovery-script "$hosts_state/find.sh" --blacklist-cooldown-range 1,2 --ping-interval 0.5s --peer-timeout 2s

# comes PATTERN: waits for a line behind the last one that came; prints it.
comes() {
  local pattern=$1
  hosts_wait "nothing like $pattern" is_there "$pattern" || fail "nothing like: $pattern"
  line=$(tail -n +$((mark + 1)) "$output" | grep -nE -m 1 -- "$pattern")
  mark=$((mark + ${line%%:*}))
  printf '%s\n' "${line#*:}"
}
is_there() { tail -n +$((mark + 1)) "$output" | grep -qE -- "$1"; }
pid_of() { sed -n "s/^\[$1\] pid //p" "$output"; }
# The newest worker that the generation of `line` has on the host.
worker_on() { sed -E "s/.*[ ,]([0-9]+-)?([0-9]+) on host $1.*/\2/" <<<"${line#*:}"; }

comes 'generation 1: 2 ranks: workers 0-1 on host h1'
comes 'begins . 2 '
list h1:2 h2:2
comes 'generation 2: 4 ranks: workers 0-1 on host h1, 2-3 on host h2'
comes 'epoch [0-9]+ 4'

echo "--- a rank is killed"
on_host 2 kill -KILL "$(pid_of 3)"
comes 'generation 2 is over: worker 3 on host h2: died of SIGKILL'
comes 'begins . 3 '
comes 'generation [0-9]+: 4 ranks'
worker=$(worker_on h2)
comes 'begins . 4 '

echo "--- rank 0 is killed"
on_host 1 kill -KILL "$(pid_of 0)"
comes 'is over: worker 0 on host h1'
comes 'generation [0-9]+: 4 ranks'
comes 'begins . 4 '

echo "--- all processes of a host are killed, and its ssh server's"
on_host 2 sh -c 'kill -KILL $(pgrep -f "[a]s-daemon|[a]s-rank|sirtaki_elastic_twi[n]")' || true
comes 'begins . 2 '
comes 'generation [0-9]+: 4 ranks'
comes 'begins . 4 '

echo "--- its link goes down, and comes back"
on_host 2 ip link set veth0 down
comes 'begins . 2 '
on_host 2 ip link set veth0 up
comes 'generation [0-9]+: 4 ranks'
comes 'begins . 4 '
comes 'epoch [0-9]+ 4'

echo "--- it leaves the list, and comes back"
list h1:2
comes 'is to change: a worker'\''s place on host h2 is listed no more'
comes 'generation [0-9]+: 2 ranks: workers .* on host h1$'
comes 'begins . 2 '
list h1:2 h2:2
comes 'generation [0-9]+: 4 ranks'
comes 'begins . 4 '
comes 'epoch [0-9]+ 4'

echo "--- the training ends well"
end_well
[ "$(grep -cE '^\[[0-9]+\] ends . 4 ' "$output")" = 4 ] || fail "not 4 ranks have ended"
[ "$(sed -nE 's/^\[[0-9]+\] ends . //p' "$output" | sort -u | wc -l)" = 1 ] || fail 'the ranks differ'

echo "--- two hosts do not reach each other, and sirtakirun reaches both: one of them goes on"
begin -H h2:1,h3:1 --blacklist-cooldown-range 100,100 --start-timeout 3 --ping-interval 0.5s --peer-timeout 2s
comes 'epoch [0-9]+ 2'
for host in 2 3; do on_host "$host" ip route add blackhole "10.77.0.$((5 - host))/32"; done
comes 'is ended: no group begins with it: its host and host h[23] do not reach each other'
comes 'generation [0-9]+: 1 rank'
comes 'begins . 1 '
comes 'host h[23] gets no worker for [0-9]+ s more: workers have failed there'
end_well
for host in 2 3; do on_host "$host" ip route del blackhole "10.77.0.$((5 - host))/32"; done

echo "--- sirtakirun is killed: all of it ends"
begin -H h1:1,h2:1
comes 'epoch [0-9]+ 2'
# shellcheck disable=SC2016  # there
on_host 1 sh -c 'kill -KILL $(pgrep -f "[s]irtakirun --elastic")'
wait "$job" || true
gone sirtaki_elastic_twin "$hosts_state/enough"
