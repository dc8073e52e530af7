#!/usr/bin/env bash
# What the scripts here share: source it, with sirtakirun as $1 and the folder of the programs of tests/faults as $2. Real
# runs on this host, of two and three ranks. A third word, "own": sirtakirun starts the ranks itself.
set -euo pipefail
# shellcheck source=tests/support/processes.sh
. "$(dirname "${BASH_SOURCE[0]}")/../support/processes.sh"

sirtakirun=${1:?usage: bash SCRIPT SIRTAKIRUN MPI-PROGRAMS [own]}
programs=${2:?usage: bash SCRIPT SIRTAKIRUN MPI-PROGRAMS}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
output=$work/output
errors=$work/errors
mpirun=${MPIEXEC:-$(command -v mpirun)}
own=${3:-}
[ -z "$own" ] || mpirun=sirtakirun   # as --launcher has it
host=$(hostname)
# The variables of the tests' own mpirun, if they run in one, are not for the launcher.
for variable in $(compgen -e | grep -E '^(OMPI|PMIX|PMI|PRTE)_' || true); do unset "$variable"; done

# run CODE ARGUMENT...: of sirtakirun, which must end with the code; within 100 s, so that a hang is a failure.
run() {
  local expected=$1 code=0
  shift
  timeout -k 5 100 "$sirtakirun" --launcher "$mpirun" --oversubscribe "$@" >"$output" 2>"$errors" </dev/null || code=$?
  [ "$code" = "$expected" ] || fail "sirtakirun $*: code $code, expected $expected"
}

# together FUNCTION...: calls them at once, each with an output of its own: runs wait most of the time. They are children of
# a shell that ignores SIGINT for them.
together() {
  local name failed=0
  declare -A process=()
  for name in "$@"; do
    (output=$work/$name.output errors=$work/$name.errors && "$name") >"$work/$name.log" 2>&1 </dev/null &
    process[$name]=$!
  done
  for name in "$@"; do
    wait "${process[$name]}" || failed=1
    cat "$work/$name.log"
  done
  [ "$failed" = 0 ] || exit 1
}

# ends FILE TEXT: its last line is the text.
ends() { [ "$(tail -n 1 "$1")" = "$2" ] || fail "the last line of $(basename "$1") is not: $2"; }

# printed COUNT WORDS: waits until that many lines of the output have the words.
have_words() { [ "$(grep -c -- "$2" "$output")" = "$1" ]; }
printed() { within 90 have_words "$1" "$2" || fail "not $1 lines with: $2"; }
