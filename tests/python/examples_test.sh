#!/usr/bin/env bash
# examples_test.sh SIRTAKIRUN PYTHON...: every program of examples/python, on 2 ranks, with good and bad arguments.
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
sirtakirun=$1
shift
python=("$@")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
failures=0

fail() {
  printf 'FAILED: %s\n' "$1"
  sed 's/^/    /' "$scratch/output"
  failures=$((failures + 1))
}

# run PROGRAM ARGUMENT...: on 2 ranks; the output goes to $scratch/output, the exit code to $code.
run() {
  local program=$top/examples/python/$1
  shift
  code=0
  timeout 240 "$sirtakirun" -np 2 --oversubscribe "${python[@]}" "$program" "$@" >"$scratch/output" 2>&1 </dev/null || code=$?
}

# expect CODE WHAT TEXT...
expect() {
  local wanted=$1 what=$2 text
  shift 2
  [ "$code" = "$wanted" ] || fail "$what: exit code $code, not $wanted"
  for text in "$@"; do
    grep -qF -e "$text" "$scratch/output" || fail "$what: no '$text' in the output"
  done
}

run train_digits.py --epochs 4
expect 0 "train_digits" "epoch   4/4" "samples per second" "parameters identical on all ranks" "2 ranks"
awk '/test accuracy:/ { good = $(NF - 1) >= 90 } END { exit !good }' "$scratch/output" || fail "train_digits: it does not learn"
run train_digits.py --epochs 2 --optimizer adam --accumulate 2 --compression bf16 --uneven pad --seed 5 --batch-size 64 --lr 0.002
expect 0 "train_digits with all its flags" "epoch   2/2" "parameters identical on all ranks"
run train_digits.py --epoch 3
expect 2 "an unknown argument" "--epoch"
run train_digits.py --epochs 0
expect 2 "no epochs" "--epochs"
run train_digits.py --epochs 3 --checkpoint "$scratch/whole"
expect 0 "a run that was not interrupted" "digest"
whole=$(grep -o 'digest .*' "$scratch/output")
run train_digits.py --epochs 3 --checkpoint "$scratch/parts" --stop-after 1
expect 0 "an interrupted run" "epoch   1/3"
run train_digits.py --epochs 3 --checkpoint "$scratch/parts" --resume
expect 0 "a resumed run" "resumed after epoch 1" "epoch   3/3" "$whole"

run synthetic_benchmark.py --model mlp --image-size 16 --batch-size 4 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 2 --no-cuda
expect 0 "synthetic_benchmark" "Model: mlp" "Iter #1:" "Total img/sec on 2 CPU(s)"
run synthetic_benchmark.py --model resnet18 --image-size 32 --batch-size 2 --num-warmup-batches 1 --num-batches-per-iter 1 --num-iters 1 --no-cuda --fp16-allreduce
expect 0 "synthetic_benchmark of a ResNet-18" "Img/sec per CPU"
run synthetic_benchmark.py --model resnet50 --image-size 32 --batch-size 2 --num-warmup-batches 0 --num-batches-per-iter 1 --num-iters 1 --no-cuda --use-adasum
expect 0 "synthetic_benchmark of a ResNet-50 by Adasum" "Img/sec per CPU"

run synthetic_benchmark.py --model mlp --image-size 16 --batch-size 4 --num-warmup-batches 0 --num-batches-per-iter 1 --num-iters 1 --no-cuda --use-adasum --fp16-allreduce
expect 0 "synthetic_benchmark by Adasum, in half precision" "Img/sec per CPU"

run resume.py --file "$scratch/whole.pt"
expect 0 "resume: not interrupted" "epoch 6"
whole=$(grep -o 'weights .*' "$scratch/output")
run resume.py --file "$scratch/parts.pt" --stop-after 2
expect 0 "resume: interrupted" "epoch 2"
run resume.py --file "$scratch/parts.pt"
expect 0 "resume: resumed" "going on after epoch 2" "epoch 6" "$whole"

run accumulation.py --steps 5
expect 0 "accumulation" "5 steps of 4 passes on 2 ranks"
awk '/differ by/ { small = $NF < 1e-5 } END { exit !small }' "$scratch/output" || fail "accumulation: the two ways differ"
run sparse_embedding.py --steps 10
expect 0 "sparse_embedding" "MiB a step"
run sparse_embedding.py --steps 3 --as-dense
expect 0 "sparse_embedding --as-dense" "MiB a step"
run accumulation.py --steps 0
expect 2 "no steps" "1 or more"
run gan.py --steps 20
expect 0 "gan" "points lie"

# Without a launcher, and by mpirun.
code=0
"${python[@]}" "$top/examples/python/gan.py" --steps 5 >"$scratch/output" 2>&1 || code=$?
expect 0 "gan alone" "points lie"
by_mpirun() {   # by_mpirun TEXT PROGRAM ARGUMENT...
  local text=$1 program=$top/examples/python/$2
  shift 2
  code=0
  bash "$top/tests/support/mpirun.sh" 2 "${python[@]}" "$program" "$@" >"$scratch/output" 2>&1 || code=$?
  expect 0 "${program##*/} by mpirun" "$text"
}
by_mpirun "points lie" gan.py --steps 5
by_mpirun "parameters identical on all ranks" train_digits.py --epochs 1
by_mpirun "Total img/sec on 2 CPU(s)" synthetic_benchmark.py --model mlp --image-size 16 --batch-size 4 --num-warmup-batches 0 \
  --num-batches-per-iter 1 --num-iters 1 --no-cuda
by_mpirun "$whole" resume.py --file "$scratch/by_mpirun.pt"
by_mpirun "3 steps of 4 passes on 2 ranks" accumulation.py --steps 3
by_mpirun "MiB a step" sparse_embedding.py --steps 3

[ "$failures" = 0 ] || { printf '%s failures\n' "$failures"; exit 1; }
echo "examples/python: all as expected"
