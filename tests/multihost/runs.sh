#!/usr/bin/env bash
# Runs of sirtakirun over ssh on several hosts, for the scripts that source this after hosts.sh, with the folder of the
# programs as $1. run_hosts: how many hosts (2).
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}
sirtakirun=$bindir/../../sirtakirun
[ -x "$sirtakirun" ] || hosts_skip 'sirtakirun is not built'
sirtakirun=$(realpath "$sirtakirun")

hosts_up "${run_hosts:-2}"
output=$hosts_state/output
errors=$hosts_state/errors
flags=(--launcher "${MPIEXEC:-$(command -v mpirun)}" --ssh-args "-F $hosts_state/ssh_config" --network-interfaces veth0 "${hosts_flags[@]}")

fail() {
  printf 'FAILED: %s\n--- standard output:\n' "$*"
  cat "$output"
  printf -- '--- standard error:\n'
  cat "$errors"
  exit 1
}

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

# Processes with these words in their command line, of all hosts. gone WORDS: none is left.
running() {
  local process
  for process in /proc/[0-9]*; do
    { tr '\0' ' ' <"$process/cmdline"; } 2>/dev/null | grep -F -- "$1" || true
  done
}
none_runs() { ! cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' ' ' | grep -qF -- "$1"; }
gone() { hosts_wait "left running" none_runs "$1" || fail "$(running "$1")"; }

says() { grep -qxF -- "$2" "$1" || fail "no line of $(basename "$1") is: $2"; }
