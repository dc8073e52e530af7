#!/usr/bin/env bash
# examples_test.sh SIRTAKIRUN PYTHON...: the programs of examples/python on 2 ranks, with good and bad arguments: a sample by
# seed, with SIRTAKI_TEST_SCALE=full all.
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
sirtakirun=$1
shift
python=("$@")
# shellcheck source=tests/support/sample.sh
. "$top/tests/support/sample.sh"
# shellcheck source=tests/support/two_versions.sh
. "$top/tests/support/two_versions.sh"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
failures=0

fail() {
  printf 'FAILED: %s\n' "$1"
  sed 's/^/    /' "$scratch/output"
  failures=$((failures + 1))
}

# run_on RANKS PROGRAM ARGUMENT...: the output goes to $scratch/output, the exit code to $code. `run`: on 2 ranks.
run_on() {
  local ranks=$1 program=$top/examples/python/$2
  shift 2
  code=0
  timeout 280 "$sirtakirun" -np "$ranks" --oversubscribe "${python[@]}" "$program" "$@" >"$scratch/output" 2>&1 </dev/null || code=$?
}
run() { run_on 2 "$@"; }

# expect CODE WHAT TEXT...
expect() {
  local wanted=$1 what=$2 text
  shift 2
  [ "$code" = "$wanted" ] || fail "$what: exit code $code, not $wanted"
  for text in "$@"; do
    grep -qF -e "$text" "$scratch/output" || fail "$what: no '$text' in the output"
  done
}

digits() {
  run train_digits.py --epochs 4
  expect 0 "train_digits" "epoch   4/4" "samples per second" "parameters identical on all ranks" "2 ranks"
  awk '/test accuracy:/ { good = $(NF - 1) >= 90 } END { exit !good }' "$scratch/output" || fail "train_digits: it does not learn"
  plain=$(awk '/test accuracy:/ { print $(NF - 1) }' "$scratch/output")
  [ -n "$plain" ] || fail "train_digits: it does not tell its accuracy"
}
powersgd() {
  run train_digits.py --epochs 4 --powersgd 2
  expect 0 "train_digits with PowerSGD" "epoch   4/4" "parameters identical on all ranks"
  awk -v plain="$plain" '/test accuracy:/ { near = $(NF - 1) >= plain - 2 } END { exit !near }' "$scratch/output" ||
    fail "train_digits with PowerSGD: without it the test accuracy is $plain %"
}
powersgd_resume() {
  local weights
  run train_digits.py --epochs 2 --powersgd 1 --powersgd-start 10 --checkpoint "$scratch/whole_factors"
  expect 0 "a run with PowerSGD" "digest"
  weights=$(grep -o 'digest .*' "$scratch/output")
  run train_digits.py --epochs 2 --powersgd 1 --powersgd-start 10 --checkpoint "$scratch/factors" --stop-after 1
  run train_digits.py --epochs 2 --powersgd 1 --powersgd-start 10 --checkpoint "$scratch/factors" --resume
  expect 0 "a run with PowerSGD that goes on" "resumed after epoch 1" "$weights"
}
digits_flags() {
  run train_digits.py --epochs 2 --optimizer adam --accumulate 2 --compression bf16 --uneven pad --seed 5 --batch-size 64 --lr 0.002
  expect 0 "train_digits with all its flags" "epoch   2/2" "parameters identical on all ranks"
}
bad_argument() {
  run train_digits.py --epoch 3
  expect 2 "an unknown argument" "--epoch"
}
no_epochs() {
  run train_digits.py --epochs 0
  expect 2 "no epochs" "--epochs"
}
# A rank is killed in the middle, and the others end with the same parameters.
digits_elastic() {
  local victim="" line
  # shellcheck disable=SC2016  # the shell around the program
  {
    code=0
    timeout 280 "$sirtakirun" --elastic --flight-records "$scratch/records" -np 3 bash -c 'echo "pid $$"; exec "$@"' bash "${python[@]}" "$top/examples/python/train_digits.py" \
      --epochs 8 2>&1 </dev/null || code=$?
    echo "exit code $code"
  } | while IFS= read -r line; do
    printf '%s\n' "$line"
    case $line in
      '[1] pid '*) victim=${line#'[1] pid '} ;;
      *'epoch   2/8'*) kill -KILL "$victim" 2>/dev/null || true ;;   # said again if nothing was committed
    esac
  done >"$scratch/output"
  code=$(sed -n 's/^exit code //p' "$scratch/output")
  expect 0 "train_digits in an elastic job" "generation 1 is over: worker 1 on host" "generation 2 has begun" "epoch   8/8" \
    "parameters identical on all ranks"
  awk '/test accuracy:/ { good = $(NF - 1) >= 90 } END { exit !good }' "$scratch/output" || fail "train_digits in an elastic job: it does not learn"
  code=0
  timeout 280 "$sirtakirun" --elastic --flight-records "$scratch/records" -np 2 "${python[@]}" "$top/examples/python/train_digits.py" --checkpoint "$scratch/no" \
    >"$scratch/output" 2>&1 </dev/null || code=$?
  expect 2 "a checkpoint in an elastic job" "an elastic job takes no --checkpoint"
}
digits_resume() {
  local weights
  run train_digits.py --epochs 3 --checkpoint "$scratch/whole"
  expect 0 "a run that was not interrupted" "digest"
  weights=$(grep -o 'digest .*' "$scratch/output")
  run train_digits.py --epochs 3 --checkpoint "$scratch/parts" --stop-after 1
  expect 0 "an interrupted run" "epoch   1/3"
  run train_digits.py --epochs 3 --checkpoint "$scratch/parts" --resume
  expect 0 "a resumed run" "resumed after epoch 1" "epoch   3/3" "$weights"
}
benchmark() {
  run synthetic_benchmark.py --model mlp --image-size 16 --batch-size 4 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 2 --no-cuda
  expect 0 "synthetic_benchmark" "Model: mlp" "Iter #1:" "Total img/sec on 2 CPU(s)"
}
benchmark_resnet18() {
  run synthetic_benchmark.py --model resnet18 --image-size 32 --batch-size 2 --num-warmup-batches 1 --num-batches-per-iter 1 --num-iters 1 --no-cuda --fp16-allreduce
  expect 0 "synthetic_benchmark of a ResNet-18" "Img/sec per CPU"
}
benchmark_resnet50() {
  run synthetic_benchmark.py --model resnet50 --image-size 32 --batch-size 2 --num-warmup-batches 0 --num-batches-per-iter 1 --num-iters 1 --no-cuda --use-adasum
  expect 0 "synthetic_benchmark of a ResNet-50 by Adasum" "Img/sec per CPU"
}
benchmark_adasum_half() {
  run synthetic_benchmark.py --model mlp --image-size 16 --batch-size 4 --num-warmup-batches 0 --num-batches-per-iter 1 --num-iters 1 --no-cuda --use-adasum --fp16-allreduce
  expect 0 "synthetic_benchmark by Adasum, in half precision" "Img/sec per CPU"
}
resume() {
  run resume.py --file "$scratch/whole.pt"
  expect 0 "resume: not interrupted" "epoch 6"
  weights=$(grep -o 'weights .*' "$scratch/output")
  run resume.py --file "$scratch/parts.pt" --stop-after 2
  expect 0 "resume: interrupted" "epoch 2"
  run resume.py --file "$scratch/parts.pt"
  expect 0 "resume: resumed" "going on after epoch 2" "epoch 6" "$weights"
}
accumulation() {
  run accumulation.py --steps 5
  expect 0 "accumulation" "5 steps of 4 passes on 2 ranks"
  awk '/differ by/ { small = $NF < 1e-5 } END { exit !small }' "$scratch/output" || fail "accumulation: the two ways differ"
}
sparse() {
  run sparse_embedding.py --steps 10
  expect 0 "sparse_embedding" "MiB a step"
}
sparse_as_dense() {
  run sparse_embedding.py --steps 3 --as-dense
  expect 0 "sparse_embedding --as-dense" "MiB a step"
}
no_steps() {
  run accumulation.py --steps 0
  expect 2 "no steps" "1 or more"
}
transformer() {
  local weights small=(--width 32 --layers 1 --context 16 --batch-size 32 --steps 60 --epochs 1 --lr 0.01)
  run train_transformer.py "${small[@]}"
  expect 0 "train_transformer" "epoch   1/1" "by the letters' frequencies alone: 2.826554"
  sed -n 's/.*validation loss: \([0-9.]*\); by.*/\1/p' "$scratch/output" | awk '$1 < 2.2 { good = 1 } END { exit !good }' ||
    fail "train_transformer: it does not learn"
  weights=$(grep -o 'digest .*' "$scratch/output")
  run train_transformer.py "${small[@]}" --shard optimizer --recompute
  expect 0 "train_transformer with its optimizer in shards" "$weights"
}
transformer_parts() {
  local whole wide=(--width 64 --layers 1 --context 16 --batch-size 8 --steps 30 --epochs 1)
  run_on 1 train_transformer.py "${wide[@]}"
  expect 0 "train_transformer on one rank" "epoch   1/1"
  whole=$(sed -n 's/.*validation loss: \([0-9.]*\); by.*/\1/p' "$scratch/output")
  run_on 2 train_transformer.py "${wide[@]}" --tensor-parallel 2 --recompute
  expect 0 "train_transformer with layers over two ranks" "parameters identical on all ranks"
  sed -n 's/.*validation loss: \([0-9.]*\); by.*/\1/p' "$scratch/output" |
    awk -v whole="$whole" '{ d = $1 - whole; good = d < 0.001 && d > -0.001 } END { exit !good }' ||
    fail "train_transformer with layers over two ranks: not the loss of one rank, $whole"
}
transformer_pipeline() {
  local whole deep=(--width 64 --layers 2 --context 19 --batch-size 8 --steps 20 --epochs 1)   # 1052 windows to test: no micro-batch lacks one
  run_on 1 train_transformer.py "${deep[@]}"
  expect 0 "train_transformer on one rank" "epoch   1/1"
  whole=$(sed -n 's/.*validation loss: \([0-9.]*\); by.*/\1/p' "$scratch/output")
  run_on 4 train_transformer.py "${deep[@]}" --tensor-parallel 2 --pipeline 2
  expect 0 "train_transformer with 2 stages of 2 ranks" "parameters identical on all ranks"
  sed -n 's/.*validation loss: \([0-9.]*\); by.*/\1/p' "$scratch/output" |
    awk -v whole="$whole" '{ d = $1 - whole; good = d < 1e-5 && d > -1e-5 } END { exit !good }' ||
    fail "train_transformer with 2 stages of 2 ranks: not the loss of one rank, $whole"
  run_on 1 train_transformer.py --pipeline 2 --micro-batches 3
  expect 2 "micro-batches that do not divide" "--micro-batches takes a number that divides the batch of 16 windows, not '3'"
}
transformer_resume() {
  local weights small=(--width 32 --layers 1 --steps 4 --epochs 2)
  run train_transformer.py "${small[@]}" --checkpoint "$scratch/whole_transformer"
  expect 0 "train_transformer not interrupted" "digest"
  weights=$(grep -o 'digest .*' "$scratch/output")
  run train_transformer.py "${small[@]}" --checkpoint "$scratch/transformer" --stop-after 1 --shard optimizer
  run train_transformer.py "${small[@]}" --checkpoint "$scratch/transformer" --resume
  expect 0 "train_transformer resumed" "resumed after epoch 1" "epoch   2/2" "$weights"
}
gan() {
  run gan.py --steps 20
  expect 0 "gan" "points lie"
}
gan_alone() {
  code=0
  "${python[@]}" "$top/examples/python/gan.py" --steps 5 >"$scratch/output" 2>&1 || code=$?
  expect 0 "gan alone" "points lie"
}
pipeline() {   # pipeline NAME ARGUMENT...: the program unsplit and as a pipeline
  local name=$1
  shift
  few_changes "$top/examples/python/${name}_unsplit.py" "$top/examples/python/${name}_pipeline.py"
  code=0
  "${python[@]}" "$top/examples/python/${name}_unsplit.py" "$@" >"$scratch/output" 2>&1 || code=$?
  expect 0 "$name unsplit" "step"
  mv "$scratch/output" "$scratch/unsplit"
  run "${name}_pipeline.py" "$@"
  expect 0 "$name as a pipeline" "step"
  same_training "$scratch/unsplit" "$scratch/output" "$name"
}
pipeline_resnet() {
  pipeline resnet --batch-size 8 --image-size 32 --micro-batches 2 --steps 4
}
pipeline_two_layers() {
  pipeline two_layers
}
by_mpirun() {   # by_mpirun TEXT PROGRAM ARGUMENT...
  local text=$1 program=$top/examples/python/$2
  shift 2
  code=0
  bash "$top/tests/support/mpirun.sh" 2 "${python[@]}" "$program" "$@" >"$scratch/output" 2>&1 || code=$?
  expect 0 "${program##*/} by mpirun" "$text"
}
gan_by_mpirun() {
  by_mpirun "points lie" gan.py --steps 5
}
digits_by_mpirun() {
  by_mpirun "parameters identical on all ranks" train_digits.py --epochs 1
}
benchmark_by_mpirun() {
  by_mpirun "Total img/sec on 2 CPU(s)" synthetic_benchmark.py --model mlp --image-size 16 --batch-size 4 --num-warmup-batches 0 \
    --num-batches-per-iter 1 --num-iters 1 --no-cuda
}
resume_by_mpirun() {
  by_mpirun "${weights:-weights}" resume.py --file "$scratch/by_mpirun.pt"
}
accumulation_by_mpirun() {
  by_mpirun "3 steps of 4 passes on 2 ranks" accumulation.py --steps 3
}
sparse_by_mpirun() {
  by_mpirun "MiB a step" sparse_embedding.py --steps 3
}

digits
for check in $(sample 2 digits_elastic digits_resume digits_flags powersgd powersgd_resume benchmark benchmark_resnet18 benchmark_resnet50 benchmark_adasum_half resume \
  accumulation sparse sparse_as_dense gan) $(sample 1 transformer transformer_parts transformer_pipeline transformer_resume) \
  $(sample 1 pipeline_resnet pipeline_two_layers) \
  $(sample 1 bad_argument no_epochs no_steps gan_alone) \
  $(sample 1 gan_by_mpirun digits_by_mpirun benchmark_by_mpirun resume_by_mpirun accumulation_by_mpirun sparse_by_mpirun); do
  "$check"
done

[ "$failures" = 0 ] || { printf '%s failures\n' "$failures"; exit 1; }
echo "examples/python: all as expected"
