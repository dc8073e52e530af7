#!/usr/bin/env bash
# resume_test.sh PROGRAM: train_digits stops, goes on, and ends with the same parameters as if it had not stopped.
set -euo pipefail
program=$1
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

# The lines that tell what was learned.
result() { grep -e '^test accuracy' -e 'digest' "$scratch/output" || true; }

same_result() {
  [ "$(result)" = "$whole" ] || fail "$1: not the result of a run without a stop, which is: $whole"
}

arguments=(--epochs 4 --optimizer adam --accumulate 2 --batch-size 16)
run 2 "${arguments[@]}"
expect 0 "a run without a stop" "digest"
whole=$(result)

run 2 "${arguments[@]}" --checkpoint "$scratch/run/a" --resume --stop-after 1
expect 0 "the first part" "no checkpoint yet" "epoch   1/4"
if grep -qF "epoch   2/4" "$scratch/output"; then fail "--stop-after 1 did not stop"; fi
[ "$(result)" != "$whole" ] || fail "one epoch gives what four give"
first=1
if full; then
  run 2 "${arguments[@]}" --checkpoint "$scratch/run/a" --resume --stop-after 2
  expect 0 "the second part" "resumed after epoch 1" "epoch   3/4"
  first=3
fi
run 2 "${arguments[@]}" --checkpoint "$scratch/run/a" --resume
expect 0 "the last part" "resumed after epoch $first" "epoch   4/4"
same_result "stopped and resumed"

# --- what PowerSGD has left out goes on too, as the mean of the ranks that a checkpoint holds ---
factors=(--epochs 4 --powersgd 1)   # the first two epochs send whole gradients
run 2 "${factors[@]}" --checkpoint "$scratch/run/whole"
expect 0 "PowerSGD without a stop" "digest"
of_factors=$(result)
run 2 "${factors[@]}" --checkpoint "$scratch/run/factors" --stop-after 3
run 2 "${factors[@]}" --checkpoint "$scratch/run/factors" --resume
expect 0 "PowerSGD resumed" "resumed after epoch 3" "epoch   4/4"
[ "$(result)" = "$of_factors" ] || fail "PowerSGD resumed: not the result of a run without a stop, which is: $of_factors"

# --- with SIRTAKI_TEST_SCALE=full all of these, else one by seed ---
is_over() {
  run 2 "${arguments[@]}" --checkpoint "$scratch/run/a" --resume
  expect 0 "a run that was over" "resumed after epoch 4"
  same_result "a run that was over"
}

# With another number of ranks it goes on too, at the learning rate that this number has there.
learning_rate() { sed -n 's/^resumed after epoch .*, at a learning rate of //p' "$scratch/output"; }
other_numbers() {
  run 2 "${arguments[@]}" --epochs 8 --checkpoint "$scratch/run/a" --resume --stop-after 1
  expect 0 "on two ranks" "resumed after epoch 4" "epoch   5/8"
  of_two=$(learning_rate)
  run 0 "${arguments[@]}" --epochs 8 --checkpoint "$scratch/run/a" --resume --stop-after 1
  expect 0 "on one rank" "written by 2 ranks and is read by 1" "resumed after epoch 5" "epoch   6/8"
  of_one=$(learning_rate)
  run 2 "${arguments[@]}" --epochs 8 --checkpoint "$scratch/run/a" --resume --stop-after 1
  expect 0 "on two ranks again" "is read by 2" "resumed after epoch 6" "epoch   7/8"
  # The schedule falls along a cosine from epoch 2 to epoch 9, of the double on two ranks.
  awk -v two="$of_two" -v one="$of_one" -v again="$(learning_rate)" 'BEGIN {
    fall(4, 0.004, two); fall(5, 0.002, one); fall(6, 0.004, again); exit bad
  }
  function fall(epoch, highest, is,   expected) {
    expected = highest * 0.5 * (1 + cos(atan2(0, -1) * (epoch - 2) / 7))
    if (is < 0.97 * expected || is > 1.03 * expected) bad = 1
  }' || fail "learning rates $of_two on 2 ranks, $of_one on 1 and $(learning_rate) on 2 again"
}

no_folder() {
  touch "$scratch/file"
  run 2 "${arguments[@]}" --checkpoint "$scratch/file"
  expect error "no folder for checkpoints" "cannot create directories" "file"
}

other_optimizer() {
  run 2 "${arguments[@]}" --optimizer sgd --stop-after 1 --checkpoint "$scratch/run/b"
  expect 0 "another optimizer" "epoch   1/4"
  run 2 "${arguments[@]}" --checkpoint "$scratch/run/b" --resume
  expect error "a checkpoint of another optimizer" "SGDOptions in the file" "AdamOptions here"
}
for check in $(sample 1 is_over other_numbers no_folder other_optimizer); do "$check"; done

truncate -s -100 "$scratch/run/a/digits.pt"
run 2 "${arguments[@]}" --checkpoint "$scratch/run/a" --resume
expect error "a damaged checkpoint" "rank 0: " "rank 1: " "$scratch/run/a/digits.pt: is cut off"
done_with "resuming"
