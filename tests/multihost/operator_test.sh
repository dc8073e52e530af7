#!/usr/bin/env bash
# A job as Kubeflow's MPI Operator starts it, examples/kubernetes/train_digits.yaml, in pods of pods.sh: the launcher is there first,
# then the names of workers, then their ssh servers, which are not root's. A second word, "own": sirtakirun starts the ranks itself.
# SIRTAKI_TEST_REPEAT: how often the job starts (1); the time from the last worker's answer to the end of init() is printed.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/multihost/pods.sh
. "$(dirname "$0")/pods.sh"
# shellcheck source=tests/support/processes.sh
. "$(dirname "$0")/../support/processes.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS [own]}
own=${2:-}
sirtakirun=$bindir/../../sirtakirun
program=$bindir/../../examples/train_digits
for needed in "$sirtakirun" "$program"; do
  [ -x "$needed" ] || hosts_skip "$(basename "$needed") is not built"
done
sirtakirun=$(realpath "$sirtakirun")
program=$(realpath "$program")

pods_up train-digits train-digits-launcher train-digits-worker-0 train-digits-worker-1
implementation=OpenMPI
[[ $hosts_mpi != *HYDRA* ]] || implementation=MPICH
operator_up "$implementation" 2 2 3
output=$hosts_state/output
errors=$hosts_state/errors
launcher=${MPIEXEC:-$(command -v mpirun)}
[ -z "$own" ] || launcher=sirtakirun hosts_flags=()
in_pod 1 "$sirtakirun" --version >/dev/null || hosts_skip 'an ordinary user cannot run sirtakirun here'

# The launcher of the pod, as $job; each line of its output is behind the time at which it came.
begin() {
  : >"$output"
  in_pod 1 env "${operator[@]}" SIRTAKI_LOG_LEVEL=info timeout -k 5 200 "$sirtakirun" --launcher "$launcher" "${hosts_flags[@]}" \
    --hostfile /etc/mpi/hostfile "$@" > >(stamp >"$output") 2> >(stamp >"$errors") </dev/null &
  job=$!
}
stamp() { while IFS= read -r line; do printf '%s %s\n' "$EPOCHREALTIME" "$line"; done; }
finish() {
  local code=0
  wait "$job" || code=$?
  [ "$code" = "$1" ] || fail "code $code, expected $1"
}
# tells PATTERN FILE: some line is so.
tells() { grep -qE -- "^[0-9.]+ $1" "$2"; }
expect() { hosts_wait "$(basename "$2") does not tell: $1" tells "$1" "$2" || fail 'it does not come'; }

# end_worker K: its ssh server, as when the pod is deleted.
end_worker() {
  on_host "$1" sh -c 'for process in /proc/[0-9]*; do
    read -r name 2>/dev/null <$process/comm && [ "$name" = sshd ] && kill "${process#/proc/}"; done; true'
  hosts_wait 'sshd goes on' eval "! on_host $1 sh -c 'cat /proc/[0-9]*/comm' 2>/dev/null | grep -qx sshd" || fail 'it is there'
}
resets_of() { on_host "$1" awk '/^Tcp: [0-9]/ {print $15}' /proc/net/snmp; }
refused() { [ "$(resets_of "$1")" -gt "$2" ]; }
has_no_way() { on_host 1 ip neigh show 10.77.0.3 | grep -qE 'INCOMPLETE|FAILED'; }
serve() {
  worker "$1"
  hosts_wait 'no ssh server' grep -q 'Server listening' "$hosts_state/worker$1.log" || fail 'it does not listen'
}

# late_workers network|server: what the last worker has last.
late_workers() {
  local resets
  withdraw
  on_host 1 ip neigh flush dev veth0
  [ "$1" = server ] || on_host 3 ip link set veth0 down
  begin "$program" --epochs 1
  hosts_wait 'the launcher does not look for the first worker' asked_for 2 || fail 'no question'
  resets=$(resets_of 2)
  publish 2
  hosts_wait 'nobody calls the first worker' refused 2 "$resets" || fail 'no call'
  serve 2
  hosts_wait 'the launcher does not look for the second worker' asked_for 3 || fail 'no question'
  resets=$(resets_of 3)
  publish 3
  if [ "$1" = server ]; then
    hosts_wait 'nobody calls the second worker' refused 3 "$resets" || fail 'no call'
    serve 3
  else
    hosts_wait 'nobody calls the second worker' has_no_way || fail 'no call'
    serve 3
    on_host 3 ip link set veth0 up
  fi
  answers=$EPOCHREALTIME
  finish 0
  expect 'sirtakirun: waiting up to 10 min for hosts that do not answer yet; train-digits-worker-[01]\.train-digits\.default\.svc: ssh: ' "$errors"
  expect 'sirtakirun: network 10\.77\.0\.0/24 by veth0$' "$errors"
  expect '\[0\] 1433 training and 364 test samples; 4 ranks' "$output"
  expect '\[0\] parameters identical on all ranks' "$output"
  for host in 2 3; do end_worker "$host"; done
}
# The last of the lines, since the last worker has answered.
since() { grep -E -- "$1" "$2" | tail -n 1 | awk -v from="$answers" '{printf "%.2f", $1 - from}'; }

echo "--- workers that come after the launcher: first their names, then their servers, or the last one's network"
for ((round = 0; round < ${SIRTAKI_TEST_REPEAT:-1}; ++round)); do
  for last in network server; do
    late_workers "$last"
    printf '%s last: after it, init() %s s, first epoch %s s\n' "$last" "$(since 'rank [0-9]+ of 4' "$errors")" "$(since 'epoch +1/1' "$output")"
  done
done

# up: all workers answer.
up() {
  local host
  for host in 2 3; do
    publish "$host"
    serve "$host"
  done
}
where() { printf 'echo "%s $(hostname) $LOCAL_RANK/$LOCAL_WORLD_SIZE"' "$1"; }

echo "--- a launcher that is a worker too: its own name is longer than the hostfile's"
withdraw
up
publish 1
sed -i "1i $(sed -n "1s/${pod_names[1]}/${pod_names[0]}/p" "$hosts_state/mpi/hostfile")" "$hosts_state/mpi/hostfile"
begin bash -c "$(where ran)"
finish 0
for rank in 0 1 2 3 4 5; do
  expect "\\[$rank\\] ran ${pod_names[rank / 2]} $((rank % 2))/2" "$output"
done
sed -i 1d "$hosts_state/mpi/hostfile"

echo "--- a worker that ranks cannot start on: the other, which is out of reach, is not waited for"
end_worker 3
on_host 1 sh -c 'printf "#!/bin/sh\n" >/tmp/only_here && chmod 755 /tmp/only_here'
began=$SECONDS
begin /tmp/only_here
finish 2
expect "sirtakirun: host $(full_name 2): program \"/tmp/only_here\" cannot be started there" "$errors"
[ $((SECONDS - began)) -le 60 ] || fail "it took $((SECONDS - began)) s"

echo "--- a worker that does not come"
begin --wait-for-hosts 1 true
finish 2
expect "sirtakirun: host $(full_name 3): no ssh server listens there .*; it was waited for, 1 s \\(--wait-for-hosts\\)" "$errors"
! tells "sirtakirun: host $(full_name 2)" "$errors" || fail 'it tells of the other, too'

echo "--- a job that is deleted while it waits"
begin true
expect 'sirtakirun: waiting up to 10 min' "$errors"
on_host 1 sh -c 'for process in /proc/[0-9]*; do
  case $(tr "\0" " " <$process/cmdline) in "$1 "*--hostfile*) kill "${process#/proc/}" ;; esac; done 2>/dev/null; true' sh "$sirtakirun"
finish 143
