#!/usr/bin/env bash
# A job without MPI and without an operator, examples/kubernetes/train_digits_job.yaml, in pods of pods.sh: they start in any order,
# the name of rank 0's comes late, and pods are started again before all have met. SIRTAKI_TEST_SCALE=full: all of that, and
# SIRTAKI_TEST_REPEAT times (1); the time from the last pod's start to the end of init() is printed.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/multihost/pods.sh
. "$(dirname "$0")/pods.sh"
# shellcheck source=tests/support/processes.sh
. "$(dirname "$0")/../support/processes.sh"
# shellcheck source=tests/support/sample.sh
. "$(dirname "$0")/../support/sample.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}
program=$bindir/../../examples/train_digits
[ -x "$program" ] || hosts_skip 'train_digits is not built'
program=$(realpath "$program")
file=$hosts_project/examples/kubernetes/train_digits_job.yaml

# Pod 5 is where rank 0 is started again.
pods_up train-digits-job train-digits-job-{0,1,2,3,0}
[ "$(sed -n 's/^ *completions: *//p' "$file")" = 4 ] || fail 'the example has another number of pods'
# The variables of the example, with what a Secret gives.
mapfile -t pod_variables < <(awk '$1 == "-" && $2 == "name:" {name = $3} $1 == "value:" {gsub("\"", ""); print name "=" $2}' "$file")
pod_variables+=(SIRTAKI_SECRET=0123456789abcdef0123456789abcdef SIRTAKI_LOG_LEVEL=info OMP_NUM_THREADS=1)
in_pod 1 env -u WORLD_SIZE -u SIRTAKI_LOG_LEVEL "$program" --help >/dev/null || hosts_skip 'an ordinary user cannot run train_digits here'

output=$hosts_state/output
stamp() { while IFS= read -r line; do printf '%s %s %s\n' "$EPOCHREALTIME" "$1" "$line"; done >>"$output"; }
declare -A ranks   # the processes, by pod
# start POD: its rank; what it prints has the rank and the time before each line.
start() {
  local rank=$((($1 - 1) % 4))
  in_pod "$1" env "JOB_COMPLETION_INDEX=$rank" timeout -k 5 200 "$program" --epochs 1 > >(stamp "$rank") 2>&1 </dev/null &
  ranks[$1]=$!
}
# stop POD: its container dies, as where a node runs out of memory.
stop() {
  on_host "$1" sh -c 'for process in /proc/[0-9]*; do
    read -r name 2>/dev/null <$process/comm && [ "$name" = train_digits ] && kill -KILL "${process#/proc/}"; done; true'
  wait "${ranks[$1]}" 2>/dev/null || true
  unset "ranks[$1]"
}
# connected POD: how many connections it has with rank 0's port.
connected() { on_host "$1" awk '$2 ~ /:72D8$/ && $4 == "01"' /proc/net/tcp /proc/net/tcp6 | wc -l; }   # 29400
has_connected() { [ "$(connected "$1")" -ge "$2" ]; }
listens() { on_host "$1" awk '$2 ~ /:72D8$/ && $4 == "0A"' /proc/net/tcp /proc/net/tcp6 | grep -q .; }

begin() {
  withdraw
  : >"$output"
  ranks=()
}
# finish: all ranks have trained the same.
finish() {
  local pod code
  last=$EPOCHREALTIME
  for pod in "${!ranks[@]}"; do
    code=0
    wait "${ranks[$pod]}" || code=$?
    [ "$code" = 0 ] || fail "pod $pod: code $code"
  done
  hosts_wait 'it does not train' grep -qE '^[0-9.]+ 0 parameters identical on all ranks' "$output" || fail 'no end'
  grep -qE '^[0-9.]+ 0 1433 training and 364 test samples; 4 ranks' "$output" || fail 'not by 4 ranks'
  grep -E 'rank [0-9]+ of 4' "$output" | tail -n 1 | awk -v from="$last" '{printf "init() of all ranks %.2f s after the last start\n", $1 - from}'
}

any_order() {
  local pods pod
  begin
  mapfile -t pods < <(shuf -e 1 2 3 4 --random-source=<(yes "$SIRTAKI_TEST_SEED $round"))
  echo "--- pods that start in the order ${pods[*]}, each when the one before has begun, and rank 0's name after all"
  for pod in "${pods[@]}"; do
    start "$pod"
    if [ "$pod" = 1 ]; then
      hosts_wait 'rank 0 does not listen' listens 1 || fail 'no rank 0'
    else
      : >"$hosts_state/dns.log"
      hosts_wait 'it does not look for rank 0' asked_for 1 || fail 'no question'
    fi
  done
  publish 1
  finish
}

started_again() {
  echo "--- a rank, then rank 0 at another address, that are started again before all have met"
  begin
  publish 1
  start 1
  start 2
  hosts_wait 'they do not meet' has_connected 1 1 || fail 'no meeting'
  stop 2
  start 2
  start 3
  hosts_wait 'they do not meet' has_connected 1 2 || fail 'no meeting'
  stop 1
  start 5
  publish 5 1
  hosts_wait 'they do not meet again' has_connected 5 2 || fail 'no meeting'
  start 4
  finish
}

silent() {
  echo "--- rank 0's first address is one where nobody answers"
  begin
  on_host 1 ip link set veth0 down
  publish 1
  start 2
  start 3
  start 4
  hosts_wait 'nobody calls' eval "on_host 2 ip neigh show 10.77.0.1 | grep -qE 'INCOMPLETE|FAILED'" || fail 'no call'
  start 5
  publish 5 1
  finish
  on_host 1 ip link set veth0 up
}

no_name_server() {
  local code=0 began=$SECONDS
  echo "--- a name server that does not answer holds nobody up"
  on_host 4 sh -c 'ip neigh replace 10.77.0.99 lladdr 02:00:00:00:00:09 dev veth0 nud permanent
    sed -i.answers s/10.77.0.254/10.77.0.99/ /etc/resolv.conf'
  in_pod 4 env JOB_COMPLETION_INDEX=3 SIRTAKI_START_TIMEOUT=1 timeout -k 5 200 "$program" >"$output" 2>&1 </dev/null || code=$?
  [ "$code" = 1 ] || fail "code $code"
  grep -qF 'within start_timeout: MASTER_ADDR="train-digits-job-0.train-digits-job" does not resolve: the name server does not answer' "$output" ||
    fail 'it does not say why'
  [ $((SECONDS - began)) -le 9 ] || fail "it took $((SECONDS - began)) s"   # the system waits for 10 s and more
  on_host 4 mv /etc/resolv.conf.answers /etc/resolv.conf
}

for ((round = 0; round < ${SIRTAKI_TEST_REPEAT:-1}; ++round)); do
  any_order
  full || continue
  started_again
  silent
  no_name_server
done
