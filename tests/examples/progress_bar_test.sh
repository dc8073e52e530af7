#!/usr/bin/env bash
# progress_bar_test.sh PROGRAM: train_digits draws a progress bar on a terminal that is wide enough.
# (That it draws none into a file is in train_digits_test.sh.)
set -euo pipefail
program=$1
command -v script >/dev/null || { echo "skipped: no script(1) here, which makes a terminal"; exit 77; }
export OMP_NUM_THREADS=1   # threads that wait for each other's core take most of the time of a busy machine
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() {
  printf 'FAILED: %s\n' "$1"
  cat -v "$scratch/output"
  exit 1
}

# on_terminal COLUMNS: one epoch.
on_terminal() {
  script -qec "stty cols $1 && exec '$program' --epochs 1" /dev/null >"$scratch/output" 2>&1 </dev/null ||
    fail "exit code $? on a terminal of $1 columns"
  grep -qF "epoch   1/1: loss" "$scratch/output" || fail "no line for the epoch"
}

on_terminal 100
grep -q $'\repoch   1/1 \[=* *\]' "$scratch/output" || fail "no progress bar on a terminal"
grep -qF "[========================================]" "$scratch/output" || fail "the bar never gets full"
on_terminal 40
if grep -qF '[=' "$scratch/output"; then fail "a progress bar on a terminal too narrow for it"; fi
echo "progress bar: as expected"
