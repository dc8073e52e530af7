#!/usr/bin/env bash
# train_transformer_resume_test.sh PROGRAM: train_transformer with its optimizer in shards stops and goes on, on as many
# ranks as before and on others, and ends with the same parameters as without shards.
set -euo pipefail
program=$1
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
export SIRTAKI_DETERMINISTIC=1   # runs on 3 ranks are compared: see docs/training.md, "Resume"

tiny=(--width 32 --layers 1 --context 16 --batch-size 4 --steps 4 --epochs 3)
result() { grep -e 'digest' -e '^validation loss' "$scratch/output" || true; }

run 2 "${tiny[@]}"
expect 0 "a run without a stop" "epoch   3/3"
whole=$(result)
for shard in none optimizer; do
  run 2 "${tiny[@]}" --shard "$shard" --checkpoint "$scratch/$shard" --resume --stop-after 1
  expect 0 "the first part, --shard $shard" "no checkpoint yet" "epoch   1/3"
  cp -r "$scratch/$shard" "$scratch/$shard-again"
done
run 2 "${tiny[@]}" --shard optimizer --checkpoint "$scratch/optimizer" --resume
expect 0 "with shards on 2 ranks again" "resumed after epoch 1" "epoch   3/3"
[ "$(result)" = "$whole" ] || fail "with shards on 2 ranks again: not the result of a run without a stop, $whole"

# The same without shards has gone through the same file: what differs is where AdamW's state was in between.
run 3 "${tiny[@]}" --checkpoint "$scratch/none-again" --resume
expect 0 "on 3 ranks" "written by 2 ranks and is read by 3" "resumed after epoch 1" "epoch   3/3"
of_three=$(result)
[ "$of_three" != "$whole" ] || fail "3 ranks come to what 2 come to"
run 3 "${tiny[@]}" --shard optimizer --checkpoint "$scratch/optimizer-again" --resume
expect 0 "with shards on 3 ranks" "written by 2 ranks and is read by 3" "resumed after epoch 1" "epoch   3/3"
[ "$(result)" = "$of_three" ] || fail "with shards on 3 ranks: not the result of those without, $of_three"

# The norm by which gradients are clipped is added up by their shards: last bits differ.
run 2 "${tiny[@]}" --shard gradients --checkpoint "$scratch/gradients" --resume --stop-after 1
run 3 "${tiny[@]}" --shard gradients --checkpoint "$scratch/gradients" --resume
expect 0 "with shards of gradients on 3 ranks" "written by 2 ranks and is read by 3" "resumed after epoch 1" "epoch   3/3"
same_loss "$(result)" "$of_three" || fail "with shards of gradients on 3 ranks: not the loss of those without, $of_three"
done_with "resuming train_transformer"
