#!/usr/bin/env bash
# train_resnet_gpu_test.sh PROGRAM: train_resnet alone on a GPU, stopped and resumed; skipped where there is none,
# a failure there with SIRTAKI_TEST_GPU=required.
set -euo pipefail
program=$1
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

small=(--model resnet18 --image-size 32 --batch-size 8 --warmup 1 --device cuda --images 64 --classes 2 --epochs 3 --seed 3)
run 0 "${small[@]}" --stop-after 2 --checkpoint "$scratch/run" --resume
if grep -F "cannot compute on a GPU" "$scratch/output"; then
  if [ "${SIRTAKI_TEST_GPU:-}" = required ]; then exit 1; fi
  exit 77
fi
expect 0 "two epochs" "on cuda:0" "no checkpoint yet" "epoch   2/3"
run 0 "${small[@]}" --checkpoint "$scratch/run" --resume
expect 0 "the third" "resumed after epoch 2" "epoch   3/3" "parameters identical on all ranks"
accuracy=$(sed -n 's/^epoch   3\/3: .*, accuracy \([0-9.]*\) %.*/\1/p' "$scratch/output")
awk -v is="${accuracy:-0}" 'BEGIN { exit is < 80 }' || fail "accuracy of $accuracy %"
run 0 "${small[@]}" --dtype bfloat16 --epochs 1
expect 0 "bfloat16" "resnet18, bfloat16, on cuda:0" "epoch   1/1"
# From the GPU's checkpoint to the CPU.
run 0 "${small[@]}" --device cpu --epochs 4 --checkpoint "$scratch/run" --resume
expect 0 "on the CPU" "on cpu" "resumed after epoch 3" "epoch   4/4"

done_with "train_resnet on a GPU"
