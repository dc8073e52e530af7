#!/usr/bin/env bash
# What the scripts here share: source it, with the folder of the programs as $1.
set -euo pipefail
# shellcheck source=tests/support/processes.sh
. "$(dirname "${BASH_SOURCE[0]}")/../support/processes.sh"

bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
runs=$(mktemp -d)             # an output for each run
output=$runs/output           # of the run that is looked at
: >"$output"
program=lose_a_rank           # what `lose` runs
launch=("$bindir/$program")  # and how
limit=90000                   # milliseconds until an error: so that a hang is a failure, on a slow machine too
declare -A losing=()          # runs in the background, and their processes

# Ranks that a failed test has left (stopped ones do not end by themselves), by their own word.
clean_up() {
  local process
  for process in "${losing[@]}"; do   # around mpirun, which ends its ranks
    # shellcheck disable=SC2046  # several
    kill $(cat "/proc/$process/task/$process/children" 2>/dev/null) 2>/dev/null || true
  done
  find "$runs" -maxdepth 1 -type f -exec sed -n 's/^rank [0-9]* is process \([0-9]*\)$/\1/p' {} + | while read -r process; do
    is_gone "$process" || kill -KILL "$process" 2>/dev/null || true
  done
  rm -rf "$runs"
}
trap clean_up EXIT

# The mpirun flag that keeps the other ranks alive when one dies; skips the test where there is none.
flag_to_survive() {
  local version
  version=$("${MPIEXEC:-mpirun}" --version 2>&1)
  case $version in
    *"Open MPI"* | *OpenRTE* | *PRRTE*) echo --enable-recovery ;;
    *)  # MPICH's -disable-auto-cleanup ends the others all the same
      printf 'SKIPPED: this mpirun ends all ranks when one dies: %s\n' "${version%%$'\n'*}" >&2
      exit 77
      ;;
  esac
}

# lose MPIRUN-FLAGS RANKS WHAT VICTIM [OPTION...]: runs the program; its output is in $output, and what mpirun returns in
# $output.code: it may be the victim's end or a survivor's. But a hang is a failure, and so is a rank that crashes.
lose() {
  local flags=$1 ranks=$2 code=0
  shift 2
  : >"$output.told"
  SIRTAKI_TEST_TOLD=$output.told SIRTAKI_MPIRUN_FLAGS=$flags SIRTAKI_TEST_SECONDS=150 bash "$here/../support/mpirun.sh" "$ranks" \
    "${around[@]}" "${launch[@]}" "$@" >"$output" 2>&1 || code=$?
  echo "$code" >"$output.code"
  case $code in 124 | 137) fail "$program $*: does not end" ;; esac
  ! grep -qE 'WRONG|HANGS|CRASH' "$output" || fail "$program $*: a wrong result was taken for a right one, or a rank crashed"
}

# SIGABRT, SIGBUS, SIGFPE and SIGSEGV, by the shell's codes.
# shellcheck disable=SC2016  # for the other shell
tells_of_crashes='"$0" "$@" || { code=$?; case $code in 134 | 135 | 136 | 139) echo "CRASH: $0 ended with code $code" ;; esac; exit $code; }'
around=(bash -c "$tells_of_crashes")
under_mpich() { [[ $("${MPIEXEC:-mpirun}" --version 2>&1) =~ HYDRA|MPICH ]]; }
! under_mpich || around=()   # its mpiexec ends the process that it started, and waits for that one's child

# losing NAME MPIRUN-FLAGS RANKS WHAT VICTIM [OPTION...]: `lose` in the background, since runs wait most of the time.
# lost NAME: waits for it; its output is $output then.
losing() {
  local name=$1
  shift
  (output=$runs/$name && lose "$@") &
  losing[$name]=$!
}
lost() {
  local process=${losing[$1]}
  unset "losing[$1]"
  output=$runs/$1
  printf '== %s\n' "$1"
  wait "$process" || exit 1
}

# The kernel keeps 15 letters of a program's name.
is_gone() { [ "$(cat "/proc/$1/comm" 2>/dev/null)" != "${program:0:15}" ]; }

# losing_each AT_ONCE RANKS CHECK [OPTION...]: loses a rank in each of ${runs_of[@]}, the words of which are WHAT and, last,
# VICTIM; so many at once. CHECK VICTIM looks at the output of one that is over.
losing_each() {
  local at_once=$1 ranks=$2 check=$3 first run
  shift 3
  for ((first = 0; first < ${#runs_of[@]}; first += at_once)); do
    for run in "${runs_of[@]:first:at_once}"; do
      # shellcheck disable=SC2086  # words
      losing "$run" "$survive" "$ranks" $run "$@"
    done
    for run in "${runs_of[@]:first:at_once}"; do
      lost "$run"
      "$check" "${run##* }"
      nothing_of_it_left
    done
  done
  nothing_left
}

# nothing_left: no process of the run is there any more, and with them has gone the memory that they shared; nor is
# anything of ours in /dev/shm. nothing_of_it_left: the processes alone, while other runs go on.
nothing_of_it_left() {
  local process
  while read -r process; do
    within 60 is_gone "$process" || fail "process $process is still there"
  done < <(sed -n 's/^rank [0-9]* is process \([0-9]*\)$/\1/p' "$output")
}
nothing_left() {
  local left
  nothing_of_it_left
  left=$(find /dev/shm -maxdepth 1 -iname '*sirtaki*' 2>/dev/null)
  [ -z "$left" ] || fail "left in /dev/shm: $left"
}

# expect RANK PATTERN: that rank's error, which took at most $limit milliseconds.
expect() {
  local line milliseconds
  line=$(grep -E "^rank $1 after [0-9]+ ms: " "$output" | head -n 1) || fail "rank $1 says nothing"
  printf '%s\n' "$line" | grep -qE "$2" || fail "rank $1 does not say '$2'"
  milliseconds=$(printf '%s\n' "$line" | sed 's/^rank [0-9]* after \([0-9]*\) ms.*/\1/')
  [ "$milliseconds" -le "$limit" ] || fail "rank $1 took $milliseconds ms, allowed are $limit"
  printf '%s\n' "$line"
}
