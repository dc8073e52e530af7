#!/usr/bin/env bash
# The ends of a run of four real ranks on hosts of hosts.sh, for the scripts that source this after it. Each time the whole
# job has ended in time, the last words name the rank, its host and the cause, the exit code is as docs/launching.md has
# it, and nothing is left on any host: no process, nothing in /dev/shm.
#
#   ends_need FOLDER      of the programs; ends the script with code 77, and the reason, where one is missing
#   ends_up               two hosts
#   trials WHAT END...    these ends, in turn; then $failed says whether one was wrong
#   SIRTAKI_TEST_REPEAT   how often each end comes (1); the ranks take turns to be the victim
#   SIRTAKI_TEST_ENDS     which ends, all if empty

# shellcheck source=tests/support/processes.sh
. "$(dirname "${BASH_SOURCE[0]}")/../support/processes.sh"

repeat=${SIRTAKI_TEST_REPEAT:-1}
victims=(3 0 2 1)
launcher=${MPIEXEC:-$(command -v mpirun)}
around=()   # what sirtakirun is started by
hosts=()    # its flags
per_host=2

ends_need() {
  sirtakirun=$1/../../sirtakirun
  [ -x "$sirtakirun" ] || hosts_skip 'sirtakirun is not built'
  sirtakirun=$(realpath "$sirtakirun")
  program=$(realpath "$1/../faults/end_badly")
}

ends_up() {
  hosts_up 2
  output=$hosts_state/output
  errors=$hosts_state/errors
  export SIRTAKI_TEST_RUN=$$-$SRANDOM # processes with it are ours
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
  on_host 1 timeout -k 5 200 "${around[@]}" "$sirtakirun" --launcher "$launcher" "${hosts[@]}" "$@" \
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

# finish CODE: sirtakirun has ended so, and within a time that a busy machine needs too.
finish() {
  local code=0
  wait "$job" || code=$?
  [ "$code" = "$1" ] || fail "code $code, expected $1"
  took=$((SECONDS - began))
  [ "$took" -le 120 ] || fail "ended after $took s"
}

# says PATTERN: a line of sirtakirun's last words.
says() { grep -qE -- "^sirtakirun: $1" "$errors" || fail "it does not say: $1"; }

# What MPICH leaves in /dev/shm stays: its name does not tell the job.
left() {
  local host
  for host in 1 2; do
    on_host "$host" bash -c 'for process in /proc/[0-9]*; do
      read -r name 2>/dev/null <$process/comm || continue
      case $name in sshd | bash | munged | slurmctld | slurmscriptd | slurmd) continue ;; esac
      printf "%s: %s\n" "$(hostname)" "$(tr "\0" " " <$process/cmdline)"
    done 2>/dev/null
    find /dev/shm -mindepth 1 ! -name "mpich_shm_*" -printf "$(hostname): %p\n"' || return
  done
}
nothing_left() {
  local found
  found=$(left) && [ -z "$found" ]
}
clean() { hosts_wait 'something is left' nothing_left || fail "left: $(left)"; }

# ---- the ends ----

killed() {
  begin "$program" waits -1
  hurt KILL
  finish 137
  says "rank $victim on host $host died of SIGKILL"
}

# The others find it out.
stopped() {
  begin --ping-interval 1 --peer-timeout 12 "$program" stops -1
  hurt STOP
  finish 1
  says 'rank [0-3] on host h[12] ended with exit code 1'
  says "first fault: peer lost: rank $victim is lost: "
}

# These two have a step to go.
throws() {
  begin "$program" throws "$victim"
  finish 134
  says "rank $victim on host $host threw std::runtime_error: this sample cannot be read"
}

exits() {
  begin "$program" exits "$victim"
  finish 3
  says "rank $victim on host $host ended with exit code 3"
}

signalled() {
  begin "$program" waits -1
  kill "-$1" "$(ours sirtakirun)"
  finish $((128 + $(kill -l "$1")))
  says "ended by SIG$1"
}
interrupted() { signalled INT; }
terminated() { signalled TERM; }

# ---- all of them ----

failed=0
# trials WHAT END...: of $hosts, by $launcher in $around; $per_host ranks on each.
trials() {
  local what=$1 end round slowest good
  shift
  for end in "$@"; do
    case " ${SIRTAKI_TEST_ENDS:-$end} " in *" $end "*) ;; *) continue ;; esac
    slowest=0 good=0
    for ((round = 0; round < repeat; ++round)); do
      victim=${victims[round % 4]}
      host=h$((victim / per_host + 1))
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
