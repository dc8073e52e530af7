#!/usr/bin/env bash
# train_digits_test.sh PROGRAM: what train_digits does with good and bad input, alone and on 2 ranks.
set -euo pipefail
program=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$here/../..
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

fail() {
  printf 'FAILED: %s\n' "$1"
  sed 's/^/    /' "$scratch/output"
  failures=$((failures + 1))
}

# run RANKS ARGUMENT...: the output goes to $scratch/output, the exit code to $code. 0 ranks: without mpirun.
run() {
  local ranks=$1
  shift
  code=0
  if [ "$ranks" = 0 ]; then
    "$program" "$@" >"$scratch/output" 2>&1 </dev/null || code=$?
  else
    bash "$top/tests/support/mpirun.sh" "$ranks" "$program" "$@" >"$scratch/output" 2>&1 || code=$?
  fi
}

# expect CODE TEXT...: `CODE` is a number, or "error" for any but 0.
expect() {
  local wanted=$1 what=$2 text
  shift 2
  if [ "$wanted" = error ]; then
    [ "$code" != 0 ] || fail "$what: exit code 0"
  else
    [ "$code" = "$wanted" ] || fail "$what: exit code $code, not $wanted"
  fi
  for text in "$@"; do
    grep -qF -e "$text" "$scratch/output" || fail "$what: no '$text' in the output"
  done
}

accuracy_is_good() {
  awk '/^test accuracy:/ { good = $3 >= 97 } END { exit !good }' "$scratch/output" || fail "$1: test accuracy below 97 %"
}

# --- it learns ---
for ranks in 0 2; do
  run "$ranks"
  expect 0 "training on $ranks ranks" "parameters identical on all ranks" "samples per second" "epoch  15/15"
  accuracy_is_good "training on $ranks ranks"
  [ "$(grep -c '^epoch' "$scratch/output")" = 15 ] || fail "training on $ranks ranks: not one line an epoch"
done

# --- its arguments ---
run 2 --help
expect 0 "--help" "--epochs N" "--batch-size N" "--lr X" "--seed N" "--data FILE"
[ "$(grep -c 'epochs N' "$scratch/output")" = 1 ] || fail "--help is printed by more than one rank"
run 0 --epochs=1 --batch-size 64 --lr 0.1 --seed 5 --data "$top/examples/data/digits.csv"
expect 0 "all arguments" "epoch   1/1"
run 0 --epoch 3
expect 2 "an unknown argument" "unknown argument '--epoch'" "--help"
run 0 --epochs
expect 2 "a missing value" "--epochs needs a value"
for bad in "--epochs=0" "--epochs=2x" "--batch-size=-1" "--lr=fast" "--lr=0" "--lr=nan" "--seed="; do
  run 0 "$bad"
  expect 2 "$bad" "${bad%%=*} takes a" "'${bad#*=}'"
done

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
bad_data "a short line" "1,2,3"
bad_data "a long line" "$line,4"
bad_data "an empty line" ""
bad_data "a word" "${line/0,/x,}"
bad_data "a pixel too bright" "17${line:1}"
bad_data "a class too large" "${line%,*},10"
: >"$scratch/empty.csv"
run 0 --data "$scratch/empty.csv"
expect error "an empty file" "$scratch/empty.csv"
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

[ "$failures" = 0 ] || { printf '%s failures\n' "$failures"; exit 1; }
echo "train_digits: all as expected"
