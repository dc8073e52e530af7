#!/usr/bin/env bash
# run.sh [BUILD]: draws the pictures beside it, of runs on this machine: three steps of train_digits on 2 ranks; the
# test program hold_up on 3, whose rank 1 stands still until the others have warned of it; and a batch of an MLP by each
# schedule of a pipeline on 2 ranks with a thread each.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=$(realpath "${1:-$here/../../build/release}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

ranks() { bash "$here/../../tests/support/mpirun.sh" "$@" >>"$scratch/output" 2>&1; }

# draw NAME TITLE FIRST LAST [--pipeline]
draw() {
  "$build/sirtakirun" --merge-timelines "$scratch/$1"
  python3 "$here/draw.py" "${@:5}" "$scratch/$1/timeline.json" "$here/$1.svg" "${@:2:3}"
}

ranks 2 "$build/examples/train_digits" --epochs 1 "--sirtaki-timeline=$scratch/digits"
draw digits 'train_digits on 2 ranks' 10 12

ranks 3 "$build/tests/faults/hold_up" 1 "$scratch/go" --sirtaki-stall-warning=0.1 "--sirtaki-timeline=$scratch/held-up" &
job=$!
until grep -q 'not submitted by rank 1' "$scratch/output"; do
  kill -0 "$job" 2>/dev/null || { cat "$scratch/output" >&2; exit 1; }
  sleep 0.02
done
touch "$scratch/go"
wait "$job"
draw held-up '3 ranks; the others wait for rank 1' 20 22

for schedule in gpipe 1f1b interleaved_1f1b; do
  SIRTAKI_TIMELINE=$scratch/$schedule ranks 2 "$build/benchmarks/pipelining" --draw "$schedule" --batch 512 --micro-batches 4
  draw "$schedule" "$schedule on 2 ranks" 6 6 --pipeline
done
