#!/usr/bin/env bash
# Every end of a run of real ranks, on two hosts of two over ssh and on one host of four. Each time the whole job has
# ended in time, the last words name the rank, its host and the cause, the exit code is as docs/launching.md has it, and
# nothing is left on any host: no process, nothing in /dev/shm.
#   SIRTAKI_TEST_REPEAT   how often each end comes (1); the ranks take turns to be the victim
#   SIRTAKI_TEST_ENDS     which ends, all if empty
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}
sirtakirun=$bindir/../../sirtakirun
[ -x "$sirtakirun" ] || hosts_skip 'sirtakirun is not built'
sirtakirun=$(realpath "$sirtakirun")
program=$(realpath "$bindir/../faults/end_badly")
only_mpi=$(realpath "$bindir/../faults/only_mpi")
repeat=${SIRTAKI_TEST_REPEAT:-1}
victims=(3 0 2 1)

hosts_not_under HYDRA 'MPICH leaves shared memory of ranks that are killed'
hosts_up 2
output=$hosts_state/output
errors=$hosts_state/errors
export SIRTAKI_TEST_RUN=$$-$SRANDOM # processes with it are ours

fail() {
  printf 'FAILED: %s\n--- standard output:\n' "$*"
  cat "$output"
  printf -- '--- standard error:\n'
  cat "$errors"
  exit 1
}

# ours NAME [VARIABLE=VALUE]: processes of this test that are called so and have the variable, but not those around ranks.
ours() {
  local process name
  for process in /proc/[0-9]*; do
    read -r name 2>/dev/null <"$process/comm" && [ "$name" = "$1" ] || continue
    grep -qzxF "SIRTAKI_TEST_RUN=$SIRTAKI_TEST_RUN" "$process/environ" 2>/dev/null || continue
    [ $# = 1 ] || grep -qzxF "$2" "$process/environ" 2>/dev/null || continue
    ! grep -qzxF -- --as-rank "$process/cmdline" 2>/dev/null || continue
    printf '%s\n' "${process#/proc/}"
  done
}

# begin ARGUMENT...: sirtakirun on host 1, as $job; returns when all ranks are in the midst of their work.
begin() {
  : >"$output"
  on_host 1 timeout -k 5 90 "$sirtakirun" --launcher "${MPIEXEC:-$(command -v mpirun)}" "${hosts[@]}" "$@" \
    >"$output" 2>"$errors" </dev/null &
  job=$!
  hosts_wait 'the ranks do not begin' all_begun || fail "sirtakirun $*"
  began=$SECONDS
}
all_begun() { [ "$(grep -c 'has begun' "$output")" = 4 ]; }

# hurt SIGNAL: the victim gets it.
hurt() {
  local process
  process=$(ours end_badly "RANK=$victim")
  [ -n "$process" ] || fail "rank $victim is not there"
  kill "-$1" "$process"
}

# finish CODE SECONDS: sirtakirun has ended so within this time.
finish() {
  local code=0
  wait "$job" || code=$?
  [ "$code" = "$1" ] || fail "code $code, expected $1"
  took=$((SECONDS - began))
  [ "$took" -le "$2" ] || fail "ended after $took s, allowed are $2 s"
}

# says PATTERN: a line of sirtakirun's last words.
says() { grep -qE -- "^sirtakirun: $1" "$errors" || fail "it does not say: $1"; }

# What MPICH leaves in /dev/shm stays: its name does not tell the job.
left() {
  local host
  for host in 1 2; do
    on_host "$host" bash -c 'for process in /proc/[0-9]*; do
      read -r name 2>/dev/null <$process/comm || continue
      case $name in sshd | bash) ;; *) printf "%s: %s\n" "$(hostname)" "$(tr "\0" " " <$process/cmdline)" ;; esac
    done 2>/dev/null
    find /dev/shm -mindepth 1 ! -name "mpich_shm_*" -printf "$(hostname): %p\n"'
  done
}
nothing_left() { [ -z "$(left)" ]; }
clean() { hosts_wait 'something is left' nothing_left || fail "left: $(left)"; }

# ---- the ends ----

killed() {
  begin "$program" waits -1
  hurt KILL
  finish 137 10
  says "rank $victim on host $host died of SIGKILL"
}

# The others find it out.
stopped() {
  begin --ping-interval 1 --peer-timeout 5 "$program" waits -1
  hurt STOP
  finish 1 20
  says 'rank [0-3] on host h[12] ended with exit code 1'
  says "  end_badly: peer lost: rank $victim is lost: "
}

throws() {
  begin "$program" throws "$victim"
  finish 134 10
  says "rank $victim on host $host died of SIGABRT"
  says '    what\(\):  this sample cannot be read'
}

exits() {
  begin "$program" exits "$victim"
  finish 3 10
  says "rank $victim on host $host ended with exit code 3"
}

signalled() {
  begin "$program" waits -1
  kill "-$1" "$(ours sirtakirun)"
  finish $((128 + $(kill -l "$1"))) 10
  says "ended by SIG$1"
}
interrupted() { signalled INT; }
terminated() { signalled TERM; }

# unplug WORDS PROGRAM...: the link of host 2 goes down. Its ranks end by themselves.
unplug() {
  local words=$1
  shift
  begin "$@"
  on_host 2 ip link set veth0 down
  finish 1 40
  says "$words"
  clean
  on_host 2 ip link set veth0 up
}
link_down() { unplug '(rank [23] on host h2 was lost: |  end_badly: peer lost: rank [23] is lost: )' "$program" waits -1; }
link_down_without_sirtaki() { unplug 'rank [23] on host h2 was lost: ' "$only_mpi"; }

# ---- all of them, on both ----

failed=0
# trials WHAT END...: of $hosts.
trials() {
  local what=$1 end round slowest good host
  shift
  for end in "$@"; do
    case " ${SIRTAKI_TEST_ENDS:-$end} " in *" $end "*) ;; *) continue ;; esac
    slowest=0 good=0
    for ((round = 0; round < repeat; ++round)); do
      victim=${victims[round % 4]}
      host=h1
      [ "$what" = 'one host' ] || host=h$((victim / 2 + 1))
      if (
        took=0
        "$end"
        clean
        echo "$took" >"$hosts_state/took"
      ); then
        good=$((good + 1))
        took=$(cat "$hosts_state/took")
        [ "$took" -le "$slowest" ] || slowest=$took
      fi
    done
    printf '%s, %s: %d of %d, ended within %d s\n' "$what" "$end" "$good" "$repeat" "$slowest"
    [ "$good" = "$repeat" ] || failed=1
  done
}

hosts=(-H h1:2,h2:2 --ssh-args "-F $hosts_state/ssh_config" --network-interfaces veth0)
trials 'two hosts' killed stopped throws exits interrupted terminated link_down link_down_without_sirtaki
hosts=(-np 4 --oversubscribe)
trials 'one host' killed stopped throws exits interrupted terminated
exit "$failed"
