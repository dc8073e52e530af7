#!/usr/bin/env bash
# timeline_test.sh PROGRAM SIRTAKIRUN: the timeline of train_digits on 2 or 4 ranks (with SIRTAKI_TEST_SCALE=full both), event by event, also of a run that
# was killed in the middle.
set -euo pipefail
program=$1
sirtakirun=${2:-}
[ -x "$sirtakirun" ] || { echo 'SKIPPED: built without sirtakirun' >&2; exit 77; }
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

# checked WHAT ARGUMENT...
checked() {
  local what=$1
  shift
  python3 "$here/check_timeline.py" "$@" >"$scratch/checked" 2>&1 || fail "$what: $(cat "$scratch/checked")"
  cat "$scratch/checked"
}

for ranks in $(sample 1 2 4); do
  folder=$scratch/$ranks
  run "$ranks" --epochs 2 "--sirtaki-timeline=$folder"
  expect 0 "a timeline of $ranks ranks" "epoch   2/2"
  checked "a timeline of $ranks ranks" "$folder" "$ranks"
  "$sirtakirun" --merge-timelines "$folder" >"$scratch/output" 2>&1 || fail "$ranks ranks: no merged file"
  python3 -c '
import json, sys
folder, size = sys.argv[1], int(sys.argv[2])
parts = [json.load(open(f"{folder}/rank-{rank}.json")) for rank in range(size)]
assert json.load(open(f"{folder}/timeline.json")) == sum(parts, [])
' "$folder" "$ranks" || fail "$ranks ranks: the merged file is not all of them"
  python3 "$top/docs/timelines/draw.py" "$folder/timeline.json" "$scratch/picture.svg" "$ranks ranks" 3 5 >"$scratch/output" 2>&1 &&
    python3 -c '
import sys, xml.etree.ElementTree as xml
texts = [text.text for text in xml.parse(sys.argv[1]).iter("{http://www.w3.org/2000/svg}text")]
assert all(f"rank {rank}" in texts for rank in range(int(sys.argv[2]))), texts
' "$scratch/picture.svg" "$ranks" 2>>"$scratch/output" || fail "$ranks ranks: no picture"
done

# A file: of rank 0 alone.
one_file() {
  run 2 --epochs 1 "--sirtaki-timeline=$scratch/one/trace.json"
  expect 0 "a file for the timeline" "epoch   1/1"
  [ "$(ls "$scratch/one")" = trace.json ] || fail "a file for the timeline: $(ls "$scratch/one")"
}

# Bounded.
bounded() {
  run 2 --epochs 1 "--sirtaki-timeline=$scratch/short" --sirtaki-timeline-bytes=64K
  expect 0 "a short timeline" "epoch   1/1"
  for rank in 0 1; do
    [ "$(stat -c %s "$scratch/short/rank-$rank.json")" -le 65536 ] || fail "a short timeline is longer"
    python3 -c 'import json, sys; assert "full" in json.load(open(sys.argv[1]))[-1]["name"]' "$scratch/short/rank-$rank.json" ||
      fail "a short timeline does not say that it is"
  done
}
for check in $(sample 1 one_file bounded); do "$check"; done

# Killed in the middle: every rank at once, without a word.
folder=$scratch/killed
bash "$top/tests/support/mpirun.sh" 2 "$program" --epochs 10000 "--sirtaki-timeline=$folder" >"$scratch/output" 2>&1 &
job=$!
has_begun() { grep -q '^epoch' "$scratch/output" && [ "$(stat -c %s "$folder/rank-1.json")" -gt 200000 ]; }
within 120 has_begun || fail "the run to kill does not begin"
processes=$(for process in /proc/[0-9]*; do
  tr '\0' '\n' <"$process/cmdline" 2>/dev/null | grep -qxF -e "--sirtaki-timeline=$folder" &&
    [ "$(readlink "$process/exe")" = "$(realpath "$program")" ] && echo "${process#/proc/}"
done || true)
[ "$(wc -w <<<"$processes")" = 2 ] || fail "the ranks to kill: '$processes'"
# SIGKILL may cut off a write, a stop does not.
# shellcheck disable=SC2086  # several
kill -STOP $processes
for process in $processes; do
  within 60 grep -q '^State:.*T' "/proc/$process/status" || fail "process $process does not stop"
done
# shellcheck disable=SC2086
kill -KILL $processes
wait "$job" && fail "a killed run ends well"
checked "a killed run" "$folder" 2 --cut

done_with "the timeline"
