#!/usr/bin/env bash
# sirtakirun over ssh: how ranks start, and by which interfaces.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/multihost/runs.sh
. "$(dirname "$0")/runs.sh"

echo "--- four ranks on two hosts"
export NCCL_TEST_OF_OURS=travels OTHER_TEST_OF_OURS=stays
run 0 -H h1:2,h2:2 -x WORD=given --tree-arity 3 bash -c \
  'echo "$RANK $LOCAL_RANK/$LOCAL_WORLD_SIZE $(hostname) $MASTER_ADDR $SIRTAKI_TREE_ARITY $WORD $NCCL_TEST_OF_OURS $NCCL_SOCKET_IFNAME"; [ "$RANK" = 0 ] || echo "other: $OTHER_TEST_OF_OURS"'
for rank in 0 1 2 3; do
  says "$output" "[$rank] $rank $((rank % 2))/2 h$((rank / 2 + 1)) 10.77.0.1 3 given travels =veth0"
done
says "$output" "[1] other: stays"   # this host's ranks have all
says "$output" "[3] other: "

reduces() { run 0 "$@" "$bindir/reductions" --gtest_filter='*TheLog*'; }
echo "--- a program of ours reduces over both"
reduces -H h1:2,h2:2

echo "--- interfaces by the route: of another name on each host, beside a bridge that all have alike"
for host in 1 2; do
  on_host "$host" sh -c 'ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up'
done
# rename OLD NEW: the interface of host 2.
rename() { on_host 2 sh -c "ip link set $1 down && ip link set $1 name $2 && ip link set $2 up"; }
rename veth0 eth9
with_interfaces=("${flags[@]}")
flags=("${flags[@]:0:4}" "${hosts_flags[@]}")
run 0 -H h1:2,h2:2 bash -c 'echo "$NCCL_SOCKET_IFNAME $FI_TCP_IFACE $MASTER_ADDR $SIRTAKI_LAUNCH_NETWORK"'
says "$output" "[0] =veth0 veth0 10.77.0.1 "
says "$output" "[3] =eth9 eth9 10.77.0.1 "
says "$errors" "sirtakirun: network 10.77.0.0/24 by veth0"
reduces -H h1:2,h2:2
if [[ -z $own && $hosts_mpi != *HYDRA* ]]; then   # which is told neither
  run 0 -H h1:1,h2:1 --dry-run -- true
  says "$output" "  --mca btl_tcp_if_include 10.77.0.0/24: the route to the other hosts, by veth0"
  # Without a route that serves, at least the bridge is not used.
  run 0 -H h1:1,alias:1 --dry-run -- true
  grep -q '^  --mca btl_tcp_if_exclude .*docker0.*alias is not known to this machine by name' "$output" || fail 'no exclusion'
fi
flags=("${with_interfaces[@]}")
rename eth9 veth0

echo "--- another host that is called as this one, in another domain"
printf '10.77.0.2 h1.other far.other\n' >>"$hosts_state/hosts"
sed -n 's/^\[10\.77\.0\.2\]:2222,\[h2\]/[h1.other]:2222,[far.other]/p' "$hosts_state/known_hosts" >"$hosts_state/more_hosts"
cat "$hosts_state/more_hosts" >>"$hosts_state/known_hosts"
run 0 -H h1.other:1 hostname
says "$output" "[0] h2"
run 0 -H h1:1,h1.other:1 hostname
says "$output" "[0] h1"
says "$output" "[1] h2"
run 0 -H h1:1,far.other:1 hostname   # "far" alone is no host
says "$output" "[1] h2"

echo "--- this host by its address"
run 0 -H 10.77.0.1:1,h2:1 --dry-run hostname
says "$output" "  asked before the start, over ssh: h2"
run 0 -H 10.77.0.1:1,h2:1 hostname
says "$output" "[0] h1"
says "$output" "[1] h2"

echo "--- only some slots of a host"
run 0 -H h1:2,h2:4 --include h1:1@h2:1,3 bash -c 'echo "$(hostname) $CUDA_VISIBLE_DEVICES"'
[ "$(sort "$output")" = "$(printf '[0] h1 1\n[1] h2 1,3\n[2] h2 1,3')" ] || fail 'wrong slots'

echo "--- this host named last: Open MPI has it first all the same"
run 0 -H h2:4,h1:4 --include h2:1,2@h1:3 bash -c 'echo "$(hostname) $CUDA_VISIBLE_DEVICES"'
[ "$(sed 's/^\[.\] //' "$output" | sort)" = "$(printf 'h1 3\nh2 1,2\nh2 1,2')" ] || fail 'wrong slots'

echo "--- a folder that the other host has not"
on_host 1 mkdir /tmp/only_here
code=0
on_host 1 sh -c 'cd /tmp/only_here && exec "$@"' start timeout -k 5 60 "$sirtakirun" "${flags[@]}" -H h1:1,h2:2 pwd \
  >"$output" 2>"$errors" </dev/null || code=$?
[ "$code" = 0 ] || fail "code $code"
says "$output" "[0] /tmp/only_here"
[ "$(grep -c 'sirtakirun: host h2 has no folder "/tmp/only_here": its ranks run in /' "$errors")" = 1 ] || fail 'it does not say so once'
on_host 1 rmdir /tmp/only_here

echo "--- a host that gives no answer, and nobody has asked"
on_host 2 ip link set veth0 down
peer=$(on_host 1 sh -c 'ip neigh replace 10.77.0.2 lladdr 02:00:00:00:00:09 dev veth0 nud permanent; echo done')
[ "$peer" = done ] || fail 'no lasting neighbour'
run 1 --check-hosts=false --start-timeout 3 -H h1:1,h2:1 hostname
# MPICH does not wait for it with the others, and ssh says so first where sirtakirun asks it.
late='(ranks 0-1 have|rank 1 has) not started within 3 s \(hosts: h1:1,h2:1\); --start-timeout sets how long it may take'
[ -z "$own" ] || late='host h2: it does not answer \(ssh: connect to host h2 port 2222: .*\): is it up, and does a firewall let ssh pass\?'
grep -qE "^sirtakirun: $late\$" "$errors" ||
  fail 'it does not say who is late'
gone "$hosts_state/ssh_config" " h2 "
on_host 1 ip neigh del 10.77.0.2 dev veth0
on_host 2 ip link set veth0 up
