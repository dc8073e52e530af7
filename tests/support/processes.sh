#!/usr/bin/env bash
# What the tests of whole jobs share. To be sourced; $output and $errors: the files with what the job has printed.
#
#   fail WORDS...             ends the script with both files; $errors may be unset
#   says FILE TEXT            fails if no line of the file is the text
#   within SECONDS COMMAND... waits until the command succeeds; fails when the time is over
#   running WORDS...          prints each process that has all of these in its command line, with its number
#   none_runs WORDS...        succeeds if there is none
#   gone WORDS...             waits until there is none, and fails if one stays

# shellcheck disable=SC2154  # the script sets it
fail() {
  printf 'FAILED: %s\n--- standard output:\n' "$*"
  cat "$output"
  if [ -n "${errors:-}" ]; then
    printf -- '--- standard error:\n'
    cat "$errors"
  fi
  exit 1
}

says() { grep -qxF -- "$2" "$1" || fail "no line of $(basename "$1") is: $2"; }

within() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || return 1
    sleep 0.1
  done
}

# Without a pipe or another program: any process may end meanwhile, which is no answer.
running() {
  local process words part
  for process in /proc/[0-9]*; do
    { mapfile -d '' -t words <"$process/cmdline"; } 2>/dev/null || continue
    for part in "$@"; do [[ "${words[*]}" == *"$part"* ]] || continue 2; done
    printf '%s %s\n' "${process#/proc/}" "${words[*]}"
  done
}
none_runs() {
  local found
  found=$(running "$@") && [ -z "$found" ]
}
gone() { within 100 none_runs "$@" || fail "left running: $(running "$@")"; }
