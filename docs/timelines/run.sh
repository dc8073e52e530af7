#!/usr/bin/env bash
# run.sh [BUILD]: draws the pictures beside it, of runs on this machine: three steps of train_digits on 2 ranks, and the
# test program hold_up on 3, whose rank 1 stands still until the others have warned of it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=$(realpath "${1:-$here/../../build/release}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

ranks() { bash "$here/../../tests/support/mpirun.sh" "$@" >>"$scratch/output" 2>&1; }

# draw NAME TITLE FIRST-STEP LAST-STEP
draw() {
  "$build/sirtakirun" --merge-timelines "$scratch/$1"
  python3 "$here/draw.py" "$scratch/$1/timeline.json" "$here/$1.svg" "${@:2}"
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
