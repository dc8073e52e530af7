#!/usr/bin/env bash
# Runs of sirtakirun over ssh on several hosts, for the scripts that source this after hosts.sh, with the folder of the
# programs as $1. A second word, "own": sirtakirun starts the ranks itself. run_hosts: how many hosts (2).
# shellcheck source=tests/support/processes.sh
. "$(dirname "${BASH_SOURCE[0]}")/../support/processes.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS [own]}
own=${2:-}
sirtakirun=$bindir/../../sirtakirun
[ -x "$sirtakirun" ] || hosts_skip 'sirtakirun is not built'
sirtakirun=$(realpath "$sirtakirun")

hosts_up "${run_hosts:-2}"
output=$hosts_state/output
errors=$hosts_state/errors
launcher=${MPIEXEC:-$(command -v mpirun)}
[ -z "$own" ] || launcher=sirtakirun hosts_flags=()
flags=(--launcher "$launcher" --ssh-args "-F $hosts_state/ssh_config" --network-interfaces veth0 "${hosts_flags[@]}")

start() { on_host 1 timeout -k 5 200 "$sirtakirun" "${flags[@]}" "$@" >"$output" 2>"$errors" </dev/null; }

# run CODE ARGUMENT...: of sirtakirun on host 1, which must end with the code.
run() {
  local expected=$1 code=0
  shift
  start "$@" || code=$?
  [ "$code" = "$expected" ] || fail "sirtakirun $*: code $code, expected $expected"
}

# begin ARGUMENT...: does not wait for the end; when 4 ranks have printed "begun" it is $job.
begin() {
  : >"$output"
  start "$@" &
  job=$!
  hosts_wait 'the ranks do not begin' all_begun || fail "sirtakirun $*"
}
all_begun() { [ "$(grep -c begun "$output")" = 4 ]; }

# finish CODE: of $job, which must end with it, and before `start` gives up.
finish() {
  local code=0
  wait "$job" || code=$?
  [ "$code" = "$1" ] || fail "code $code, expected $1"
}
