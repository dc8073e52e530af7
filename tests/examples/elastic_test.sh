#!/usr/bin/env bash
# elastic_test.sh PROGRAM SIRTAKIRUN: train_digits in an elastic job goes on when one of 3 ranks is killed.
set -euo pipefail
program=$1
sirtakirun=${2:-}
[ -x "$sirtakirun" ] || { echo 'SKIPPED: built without sirtakirun' >&2; exit 77; }
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

# The killed rank is the one with the lines of rank 0: its worker is number 0. The output is followed, so that it is killed in the
# middle. Log, timeline and --explain then tell of both generations.
code=0
{
  "$sirtakirun" --elastic -np 3 --prefix-timestamp --timeline "$scratch/traces" --flight-records "$scratch/records" bash -c 'echo "pid $$"; exec "$@"' bash "$program" --epochs 12 2>&1 || code=$?
  echo "exit code $code"
} | while IFS= read -r line; do
  printf '%s\n' "$line" >>"$scratch/output"
  case $line in
    *' [0] pid '*) victim=${line##* } ;;
    *'epoch   2/12'*) kill -KILL "$victim" 2>/dev/null || true ;;   # said again if nothing was committed
  esac
done
code=$(sed -n 's/^exit code //p' "$scratch/output")
expect 0 "a rank is killed" "generation 1 is over" "generation 2 has begun" "epoch  12/12" "parameters identical on all ranks"
grep -qE '^[0-9-]+ [0-9:.]+ sirtakirun: generation 1 is over: ' "$scratch/output" || fail "the lines of sirtakirun have no time"
[ "$(grep -c "epoch  12/12" "$scratch/output")" = 1 ] || fail "several ranks say how far they are"

code=0
"$sirtakirun" --explain "$scratch/records" >"$scratch/output" 2>&1 || code=$?
expect 0 "--explain" "1: 3 ranks: workers 0-2" "later: worker 0 on host" "died of SIGKILL" "2: 2 ranks: workers 1-2" \
  "sirtakirun --explain $scratch/records/previous"
"$sirtakirun" --merge-timelines "$scratch/traces" >"$scratch/output" 2>&1 || code=$?
expect 0 "--merge-timelines" "workers in"
grep -q '"name":"worker 1 on ' "$scratch/traces/timeline.json" || fail "the timeline has no worker 1"
grep -q '"name":"worker 0 on host .*: died of SIGKILL"' "$scratch/traces/timeline.json" || fail "the timeline does not say why"

code=0
"$sirtakirun" --elastic -np 2 "$program" --resume --checkpoint "$scratch/run" >"$scratch/output" 2>&1 || code=$?
expect error "a checkpoint in an elastic job" "an elastic job takes no --checkpoint"
done_with "the elastic example"
