#!/usr/bin/env bash
# How runs of sirtakirun end when a rank fails, when something is killed, and what is started again.
# shellcheck source=tests/launch/runs.sh
. "$(dirname "$0")/runs.sh"

# Where ranks tell each other that they are there.
mkdir "$work/there"
export RANKS=$work/there

# of_open_mpi WORDS: says what an mpirun of another MPI does, if it is one.
of_open_mpi() {
  [ -z "$own" ] || { echo "skipped: there is no mpirun" && return 1; }
  case $("$mpirun" --version 2>&1) in
    *"Open MPI"* | *OpenRTE* | *PRRTE*) ;;
    *) echo "skipped: $mpirun is not Open MPI's$1" && return 1 ;;
  esac
}

mpirun_is_killed() {
  echo "--- mpirun is killed"
  # What stands between mpirun and the ranks under MPICH may be gone, and they go on.
  run 137 -np 2 bash -c 'parent() { awk "/^PPid:/ { print \$2 }" "/proc/$1/status"; }
    await() { touch "$RANKS/$1$RANK"; until [ -e "$RANKS/${1}0" ] && [ -e "$RANKS/${1}1" ]; do sleep 0.1; done; }
    await there; await again
    if [ "$RANK" = 0 ]; then
      process=$(parent $PPID)
      until [ "$(cat "/proc/$(parent "$process")/comm")" = sirtakirun ]; do process=$(parent "$process"); done
      kill -KILL "$process"
    fi
    exec sleep 418'
  [ -z "$own" ] || mpirun=$(realpath "$sirtakirun")
  ends "$errors" "sirtakirun: $mpirun died of SIGKILL, and the ranks with it"
  gone "sleep 418"
}

rank_fails() {
  echo "--- a rank that fails ends the others; the last words and the code are its own"
  run 3 -np 3 bash -c 'if [ "$RANK" = 1 ]; then echo "first" >&2; echo "the reason" >&2; exit 3; fi; exec sleep 401'
  says "$errors" "sirtakirun: rank 1 on host $host ended with exit code 3"
  says "$errors" "sirtakirun: its last lines on standard error:"
  ends "$errors" "sirtakirun:   the reason"
  gone "sleep 401"
}

rank_is_killed() {
  echo "--- a rank that is killed"
  run 137 -np 2 bash -c 'if [ "$RANK" = 1 ]; then kill -KILL $$; fi; exec sleep 402'
  grep -q "^sirtakirun: rank 1 on host $host died of SIGKILL" "$errors" || fail "it does not say who died of what"
  gone "sleep 402"
}
rank_crashes() {
  run 139 -np 2 bash -c 'if [ "$RANK" = 0 ]; then kill -SEGV $$; fi; exec sleep 403'
  says "$errors" "sirtakirun: rank 0 on host $host died of SIGSEGV"
  gone "sleep 403"
}

throws() {
  echo "--- what a program threw and nobody caught is said once, and no backtrace is"
  run 134 -np 2 "$programs/end_badly" throws 1 --sirtaki-flight-records=off
  says "$errors" "[1]   what():  this sample cannot be read"
  ends "$errors" "sirtakirun: rank 1 on host $host threw std::runtime_error: this sample cannot be read"
  [ "$(grep -c '^sirtakirun: ' "$errors")" = 1 ] || fail "there is more to the verdict"
}
raises() {
  run 1 -np 2 python3 -c '
import os, time
def read(left):
    if left == 0:
        raise ValueError("this sample\ncannot be read")
    read(left - 1) if left % 2 else (read(left - 1))
time.sleep(60) if os.environ["RANK"] == "0" else read(30)'
  says "$errors" "sirtakirun: rank 1 on host $host raised ValueError: this sample"
  [ "$(grep -c '^sirtakirun: .*ValueError: this sample' "$errors")" = 1 ] || fail "it says so more than once"
  ends "$errors" "sirtakirun:   cannot be read"
}

ends_with_it() {
  echo "--- what a rank has started and left ends with it, if it ends badly"
  run 139 -np 2 bash -c 'if [ "$RANK" = 0 ]; then (trap "" TERM; exec sleep 409 >/dev/null 2>&1) & kill -SEGV $$; fi; exec sleep 409'
  gone "sleep 409"
}

group_of_its_own() {
  echo "--- a program that leads a group of its own ends with all that it has started"
  [ -n "$own" ] || { echo "skipped: an mpirun that ends its ranks itself kills what leads the rest of it" && return 0; }
  run 5 -np 2 bash -c 'if [ "$RANK" = 1 ]; then sleep 1; exit 5; fi; exec timeout 900 bash -c "trap \"\" TERM; sleep 421; sleep 421"'
  gone "sleep 421"
}
unwilling() {
  echo "--- ranks that do not want to end are ended"
  run 5 -np 2 bash -c 'trap "" TERM INT HUP; if [ "$RANK" = 1 ]; then exit 5; fi; sleep 404; sleep 404'
  gone "sleep 404"
}
stopped_itself() {
  run 6 -np 2 bash -c 'if [ "$RANK" = 1 ]; then
      until grep -q "^State:.*T" "/proc/$(cat "$RANKS/stops")/status"; do sleep 0.1; done 2>/dev/null
      exit 6
    fi
    echo $$ >"$RANKS/stops"; kill -STOP $$; exec sleep 405'
  gone "sleep 405"
}

again() {
  echo "--- what fails is started again, as often as allowed"
  run 0 -np 2 --max-restarts 2 --output-filename "$work/again" bash -c \
    'echo "attempt ${TORCHELASTIC_RESTART_COUNT:-0}"; [ "$RANK" = 0 ] || exit $((2 - ${TORCHELASTIC_RESTART_COUNT:-0}))'
  [ "$(cat "$work/again/rank.1/stdout")" = "$(printf 'attempt %d\n' 0 1 2)" ] || fail "rank.1/stdout is wrong"
  says "$errors" "sirtakirun: rank 1 on host $host ended with exit code 2"
  says "$errors" "sirtakirun: starting again, 1 of 2"
  ends "$errors" "sirtakirun: starting again, 2 of 2"
}
again_in_vain() {
  run 4 -np 2 --max-restarts 1 bash -c 'exit 4'
  [ "$(grep -c "ended with exit code 4" "$errors")" = 2 ] || fail "not two attempts"
  run 127 -np 1 --max-restarts 3 --check-hosts=false "$work/no/such/program"
  ! grep -q "starting again" "$errors" || fail "what cannot go well is started again"
}
again_without_what_is_around() {
  # What stands around the rank is killed: this machine is not gone.
  run 0 -np 1 --max-restarts 1 bash -c '[ -n "${TORCHELASTIC_RESTART_COUNT:-}" ] || { kill -KILL $PPID; exec sleep 410; }'
  ends "$errors" "sirtakirun: starting again, 1 of 1"
  gone "sleep 410"
}

cause() {
  echo "--- who was killed is the cause, also where that is seen after the launcher has begun to end the ranks"
  of_open_mpi ", and leaves rank 1 to sirtakirun" || return 0
  run 137 -np 2 bash -c '
    if [ "$RANK" = 1 ]; then
      trap "kill -KILL $$" TERM
      touch "$RANKS/set"
      sleep 419 >/dev/null 2>&1 &
      while true; do wait; done   # which the trap interrupts
    fi
    until [ -e "$RANKS/set" ]; do sleep 0.1; done
    echo "peer lost: rank 1 is lost: its process has ended" >&2
    exit 1'
  grep -q "^sirtakirun: rank 1 on host $host died of SIGKILL" "$errors" || fail "rank 1 is not named"
  gone "sleep 419"
}

is_missing() { [ ! -e "$1" ]; }
over_mpi() {
  echo "--- ranks that talk to each other: killed, and with sirtakirun"
  run 137 -np 3 "$programs/lose_a_rank" killed 1
  grep -q "^sirtakirun: rank 1 on host $host died of SIGKILL" "$errors" || fail "it does not say who died"
  : >"$output"
  "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 "$programs/lose_a_rank" stopped 1 --sirtaki-ping-interval=11 >"$output" 2>"$errors" </dev/null &
  process=$!
  printed 2 "is process"
  segments=
  for rank in $(sed -n 's/.*is process //p' "$output"); do
    segments+=" $(awk 'match($0, /\/dev\/shm\/[^ ]+/) { print substr($0, RSTART, RLENGTH) }' "/proc/$rank/maps" | sort -u | tr '\n' ' ')"
  done
  kill -KILL "$process"
  { wait "$process"; } 2>/dev/null || true
  gone "lose_a_rank stopped 1 --sirtaki-ping-interval=11"
  for segment in $segments; do
    case $segment in */mpich_shm_*)   # MPICH's name does not tell the job: what it leaves stays
      rm -f "$segment"
      continue ;;
    esac
    within 60 is_missing "$segment" || fail "left: $segment"
  done
}

# Lines that begin with "sirtakirun: ", without that.
verdict() { sed -n 's/^sirtakirun: //p' "$errors"; }
is_page() { grep -qE '^-{20,}$|^(mpirun|mpiexec|prterun) (noticed|detected|has exited)' "$errors"; }

launcher_dies() {
  echo "--- where the launcher is killed another attempt begins when the ranks of the one before have ended"
  PIDS=$work/left run 0 -np 1 --max-restarts 1 bash -c 'trap "" TERM
    if [ -s "$PIDS" ]; then ! kill -0 "$(cat "$PIDS")" || exit 9; exit 0; fi
    echo $$ >"$PIDS"; kill -KILL "$(ps -o ppid= -p "$PPID" | tr -d " ")"; while true; do sleep 0.2; done'
  says "$errors" "sirtakirun: starting again, 1 of 1"
}
fault_comes_first() {
  echo "--- the first fault that a rank has told is the cause, whoever caught it, and mpirun's page is not shown"
  of_open_mpi ", and lets rank 0 be" || return 0
  local code=0
  # Rank 1 catches it and ends with 0. MPI is not finalized then: mpirun ends rank 0, which is in its own code.
  timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe -np 2 "$programs/end_badly" absent 0 \
    --sirtaki-stall-limit=12 --sirtaki-flight-records=off >"$output" 2>"$errors" </dev/null || code=$?
  [ "$code" = 143 ] || fail "code $code"
  verdict | head -n 1 | grep -qE '^first fault: timed out: ".*has waited .* for rank 0, longer than stall_limit \(12 s\)' ||
    fail "the first fault does not come first"
  ends "$errors" "sirtakirun: rank 0 on host $host died of SIGTERM"
  ! is_page || fail "mpirun's page is there"
  gone "end_badly absent 0"
}
exits_in_a_handler() {
  echo "--- a signal's handler that calls exit() ends the program, whatever call it has interrupted"
  for what in handles leaves; do
    run 4 -np 2 "$programs/end_badly" "$what" 1 --sirtaki-flight-records=off
    says "$errors" "sirtakirun: rank 1 on host $host ended with exit code 4"
  done
}
leaves_early() {
  echo "--- a rank that ends with 0 without a word, while others need it, is named"
  of_open_mpi ", and lets rank 0 wait" || return 0
  run 143 -np 2 "$programs/end_badly" vanishes 1 --sirtaki-flight-records=off
  verdict | head -n 1 | grep -qE "^(first fault: .*rank 1 is lost|rank 1 on host $host ended with exit code 0 while others ran, and then rank 0)" ||
    fail "rank 1 is not named first"
  ! is_page || fail "mpirun's page is there"
}
page_with_verbose() {
  echo "--- mpirun's own page comes with --verbose, or where nothing else says why"
  of_open_mpi "" || return 0
  run 3 -np 2 bash -c 'exit 3'
  ! is_page || fail "mpirun's page is there"
  run 3 -np 2 --verbose bash -c 'exit 3'
  is_page || fail "mpirun's page is not there"
}

together launcher_dies fault_comes_first exits_in_a_handler leaves_early page_with_verbose mpirun_is_killed rank_fails rank_is_killed rank_crashes throws raises ends_with_it group_of_its_own unwilling stopped_itself
together again again_in_vain again_without_what_is_around cause over_mpi
