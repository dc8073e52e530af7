#!/usr/bin/env bash
# train_digits_test.sh PROGRAM: what train_digits does with good and bad input, alone and on 2 ranks.
set -euo pipefail
program=$1
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

# accuracy_is_good WHAT [PERCENT]
accuracy_is_good() {
  awk -v least="${2:-97}" '/^test accuracy:/ { good = $3 >= least } END { exit !good }' "$scratch/output" ||
    fail "$1: test accuracy below ${2:-97} %"
}

# --- it learns ---
for ranks in $(sample 1 0 2); do
  run "$ranks"
  expect 0 "training on $ranks ranks" "parameters identical on all ranks" "samples per second" "epoch  15/15"
  accuracy_is_good "training on $ranks ranks"
  [ "$(grep -c '^epoch' "$scratch/output")" = 15 ] || fail "training on $ranks ranks: not one line an epoch"
done
for rank in $(sample 1 1 2 4); do
  run 2 --powersgd "$rank"
  expect 0 "--powersgd $rank" "parameters identical on all ranks" "epoch  15/15"
  accuracy_is_good "--powersgd $rank"
done

# --- its arguments ---
run 2 --help
expect 0 "--help" "--epochs N" "--batch-size N" "--lr X" "--seed N" "--data FILE" "--optimizer" "--compression" \
  "--accumulate" "--checkpoint DIR" "--resume" "--uneven" "--powersgd RANK"
[ "$(grep -c 'epochs N' "$scratch/output")" = 1 ] || fail "--help is printed by more than one rank"
run 0 --epochs=1 --batch-size 64 --lr 0.1 --seed 5 --data "$top/examples/data/digits.csv"
expect 0 "all arguments" "epoch   1/1"
run 0 --epoch 3
expect 2 "an unknown argument" "unknown argument '--epoch'" "--help"
run 0 --epochs
expect 2 "a missing value" "--epochs needs a value"
for bad in $(sample 2 "--epochs=0" "--epochs=2x" "--batch-size=-1" "--lr=fast" "--lr=0" "--lr=nan" "--seed=" \
  "--accumulate=0" "--optimizer=lbfgs" "--compression=f8" "--uneven=keep" "--stop-after=-1" "--device=gpu"); do
  run 0 "$bad"
  expect 2 "$bad" "${bad%%=*} takes " "'${bad#*=}'"
done
run 0 --resume
expect 2 "--resume alone" "--resume needs --checkpoint DIR"
run 0 --powersgd 5
expect 2 "a rank too high" "--powersgd takes a whole number from 0 to 4, not '5'"
run 0 --powersgd 2 --compression f16
expect 2 "two compressions" "--powersgd compresses itself: leave out --compression"

# Told to all by whichever rank it is, and said once.
each_rank "--epochs 1" "--epoch 1"
expect 2 "a mistake on rank 1 only" "train_digits: rank 1: unknown argument '--epoch'"
[ "$(grep -c 'unknown argument' "$scratch/output")" = 1 ] || fail "a mistake on rank 1 only: said more than once"
each_rank "--epochs 1" "--epochs 2"
expect 2 "settings that differ" "the ranks have different settings: --epochs 1 on rank 0, --epochs 2 on rank 1"
each_rank "--epochs 1" "--epochs 1 --help"
expect 2 "--help on one rank" "different settings" "--help not given on rank 0, --help given on rank 1"

# --- the other ways to train ---
for optimizer in $(sample 1 adam adamw rmsprop adagrad); do
  run 0 --optimizer "$optimizer" --epochs 5
  expect 0 "$optimizer" "epoch   5/5"
  accuracy_is_good "$optimizer" 90
done
run 2 --optimizer adam --epochs 5 --accumulate 2 --batch-size 16 --compression bf16 --uneven pad
expect 0 "accumulation, compression and padding" "parameters identical on all ranks"
accuracy_is_good "accumulation, compression and padding" 90

# --- on a GPU, and where there is none ---
run 2 --epochs 1 --device cuda
if [ "$code" = 0 ]; then
  expect 0 "--device cuda" "epoch   1/1" "parameters identical on all ranks"
elif grep -q 'would share' "$scratch/output"; then
  expect 2 "--device cuda with one GPU" "--device cuda: ranks 0 and 1 would share a GPU" "start as many ranks as there are GPUs"
else
  expect 2 "--device cuda without a GPU" "--device cuda: rank 0 cannot compute on a GPU: LibTorch"
  [ "$(grep -c 'cannot compute' "$scratch/output")" = 1 ] || fail "--device cuda without a GPU: said more than once"
fi
each_rank "--device cuda" "--device auto"
expect 2 "devices that differ" "the ranks have different settings: --device cuda on rank 0, --device auto on rank 1"
run 2 --epochs 1 --device auto
expect 0 "--device auto" "epoch   1/1"

# --- its data ---
run 0 --data "$scratch/missing.csv"
expect error "a missing file" "$scratch/missing.csv" "No such file"
line=$(head -n 1 "$top/examples/data/digits.csv")
# bad_data WHAT LINE: the second of three lines is wrong.
bad_data() {
  printf '%s\n%s\n%s\n' "$line" "$2" "$line" >"$scratch/bad.csv"
  run 0 --data "$scratch/bad.csv"
  expect error "$1" "$scratch/bad.csv:2: " "field"
}
# By seed two of them.
for kind in $(sample 2 short long empty word bright class); do
  case $kind in
    short) bad_data "a short line" "1,2,3" ;;
    long) bad_data "a long line" "$line,4" ;;
    empty) bad_data "an empty line" "" ;;
    word) bad_data "a word" "${line/0,/x,}" ;;
    bright) bad_data "a pixel too bright" "17${line:1}" ;;
    class) bad_data "a class too large" "${line%,*},10" ;;
  esac
done
: >"$scratch/empty.csv"
run 0 --data "$scratch/empty.csv"
expect error "an empty file" "$scratch/empty.csv"
printf '%s\n%s\n\n\r\n' "$(cat "$top/examples/data/digits.csv")" "$line" >"$scratch/blank.csv"
run 0 --data "$scratch/blank.csv" --epochs 1
expect 0 "blank lines at the end" "epoch   1/1"
run 2 --data "$scratch/bad.csv"
expect error "bad data on 2 ranks" "$scratch/bad.csv:2: "

# One host lacks the file: its rank says so, and ends the other. A copy of the program far from the data has none.
mkdir "$scratch/bare"
cp "$program" "$scratch/bare/train_digits"
cat >"$scratch/rank.sh" <<'END'
if [ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-}}" = 1 ]; then cd "$1/bare" && exec ./train_digits --epochs 1; fi
exec "$2" --epochs 1
END
whole=$program
program=bash
run 2 "$scratch/rank.sh" "$scratch" "$whole"
program=$whole
expect error "no data on one of 2 ranks" "rank 1: data/digits.csv was not found" "--data FILE" "rank 0: "

# --- no progress bar where there is no terminal ---
run 0 --epochs 1
expect 0 "one epoch into a file" "epoch   1/1"
if grep -q -e '\[=' -e $'\r' "$scratch/output"; then fail "a progress bar in a file"; fi

done_with "train_digits"
