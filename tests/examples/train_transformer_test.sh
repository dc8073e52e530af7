#!/usr/bin/env bash
# train_transformer_test.sh PROGRAM: train_transformer learns on 2 ranks, and with --shard and --recompute it comes to the
# same parameters, to the bit, on 2 and on 3 ranks; layers and stages that ranks share come to the same loss; and what it says of
# bad arguments.
set -euo pipefail
program=$1
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
export SIRTAKI_DETERMINISTIC=1   # runs on 3 ranks are compared: see docs/training.md, "Resume"

result() { grep -e 'digest' -e '^validation loss' "$scratch/output" || true; }

# --- it learns, and shards change nothing ---
small=(--width 32 --layers 1 --context 16 --batch-size 32 --steps 60 --epochs 1 --lr 0.01)
run 2 "${small[@]}"
# The last number is that of the text, which examples/python makes as well.
expect 0 "2 ranks" "epoch   1/1" "parameters identical on all ranks" "by the letters' frequencies alone: 2.826554"
awk '/^validation loss:/ { good = $3 + 0 < 2.2 } END { exit !good }' "$scratch/output" || fail "2 ranks: it does not learn"
whole=$(result)
run 2 "${small[@]}" --shard optimizer --recompute
expect 0 "2 ranks with shards" "epoch   1/1"
[ "$(result)" = "$whole" ] || fail "2 ranks with shards: not the result of those without, $whole"

tiny=(--width 32 --layers 2 --context 16 --batch-size 4 --steps 4 --epochs 2)
run 3 "${tiny[@]}"
expect 0 "3 ranks" "epoch   2/2" "parameters identical on all ranks"
whole=$(result)
run 3 "${tiny[@]}" --shard optimizer
expect 0 "3 ranks with shards" "epoch   2/2"
[ "$(result)" = "$whole" ] || fail "3 ranks with shards: not the result of those without, $whole"
# The norm by which gradients are clipped is added up by shards: last bits differ.
run 3 "${tiny[@]}" --shard gradients
expect 0 "3 ranks with shards of gradients" "epoch   2/2" "parameters identical on all ranks"
same_loss "$(result)" "$whole" ||
  fail "3 ranks with shards of gradients: not the loss of those without, $whole"

# --- two ranks that share each layer come to the loss of one that has them whole ---
wide=(--width 64 --layers 1 --context 16 --batch-size 8 --steps 30 --epochs 1)
run 1 "${wide[@]}"
expect 0 "1 rank" "epoch   1/1"
whole=$(result)
run 2 "${wide[@]}" --tensor-parallel 2 --recompute
expect 0 "2 ranks that share each layer" "epoch   1/1" "parameters identical on all ranks"
same_loss "$(result)" "$whole" || fail "2 ranks that share each layer: not the loss of one with whole layers, $whole"
run 4 "${wide[@]}" --tensor-parallel 2 --shard optimizer
expect 0 "4 ranks, two of which share a layer" "epoch   1/1" "parameters identical on all ranks"
whole=$(result)
run 2 "${wide[@]}"
same_loss "$(result)" "$whole" || fail "2 ranks with whole layers: not the loss of 2 x 2 ranks, $whole"

# --- two stages, each layer of which two ranks share, come to the loss of one rank that has all ---
deep=(--width 64 --layers 2 --context 19 --batch-size 8 --steps 20 --epochs 1)   # 1052 windows to test: no micro-batch lacks one
run 1 "${deep[@]}"
whole=$(result)
run 4 "${deep[@]}" --tensor-parallel 2 --pipeline 2
expect 0 "2 stages of 2 ranks" "epoch   1/1" "parameters identical on all ranks"
same_loss "$(result)" "$whole" 1e-5 || fail "2 stages of 2 ranks: not the loss of one rank that has all, $whole"
run 2 "${deep[@]}"
whole=$(result)
run 4 "${deep[@]}" --pipeline 2 --micro-batches 2 --shard optimizer --recompute
expect 0 "2 copies of 2 stages" "epoch   1/1" "parameters identical on all ranks"
same_loss "$(result)" "$whole" 1e-5 || fail "2 copies of 2 stages: not the loss of 2 ranks that have all, $whole"

# --- its arguments ---
run 2 --help
expect 0 "--help" "--shard WHAT" "--recompute"
for bad in $(sample 2 "--context=0" "--width=31" "--width=40" "--layers=0" "--shard=all" "--lr=0" "--steps=-1" "--tensor-parallel=0"); do
  run 0 "$bad"
  expect 2 "$bad" "${bad%%=*} takes " "'${bad#*=}'"
done
run 0 --resume
expect 2 "--resume alone" "--resume needs --checkpoint DIR"
run 3 --tensor-parallel 2
expect 2 "ranks that do not divide" "--tensor-parallel takes a number that divides the 3 ranks, not '2'"
for other in "--shard gradients" "--checkpoint $scratch/parts"; do
  for split in --tensor-parallel --pipeline; do
    run 0 "$split" 2 $other   # two words
    expect 2 "$other with $split" "takes no $split"
  done
done
run 0 --pipeline 2 --micro-batches 3
expect 2 "micro-batches that do not divide" "--micro-batches takes a number that divides the batch of 16 windows, not '3'"
run 2 --pipeline 3
expect 2 "stages that do not divide" "--pipeline takes a number that divides the 2 ranks, not '3'"
run 2 --batch-size 2000
expect 2 "a batch that is too large" "the text is too short for a batch of 2000 windows on each of 2 ranks"
each_rank "--shard none" "--shard optimizer"
expect 2 "settings that differ" "the ranks have different settings: --shard none on rank 0, --shard optimizer on rank 1"
done_with "train_transformer"
