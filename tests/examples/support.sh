# For sourcing by the tests of the examples, which set program before.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$here/../..
# shellcheck source=tests/support/sample.sh
. "$top/tests/support/sample.sh"
# shellcheck source=tests/support/processes.sh
. "$top/tests/support/processes.sh"
export OMP_NUM_THREADS=1   # threads that wait for each other's core take most of the time of a busy machine
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

# each_rank RANK0 RANK1 [ARGUMENT...]: on 2 ranks, with the words of RANK0 and RANK1 for the one and the other.
each_rank() {
  local whole=$program zero=$1 one=$2
  shift 2
  cat >"$scratch/rank.sh" <<'END'
program=$1 zero=$2 one=$3
shift 3
words=$zero
if [ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-}}" = 1 ]; then words=$one; fi
# shellcheck disable=SC2086  # words
exec "$program" $words "$@"
END
  program=bash
  run 2 "$scratch/rank.sh" "$whole" "$zero" "$one" "$@"
  program=$whole
}

# same_loss A B [TOLERANCE]: whether the validation losses in two texts differ in last bits alone.
same_loss() {
  local a b
  a=$(sed -n 's/^validation loss: \([0-9.]*\);.*/\1/p' <<<"$1")
  b=$(sed -n 's/^validation loss: \([0-9.]*\);.*/\1/p' <<<"$2")
  awk -v a="$a" -v b="$b" -v most="${3:-1e-4}" 'BEGIN { d = a - b; exit !(a > 0 && b > 0 && d < most && d > -most) }'
}

# done_with WHAT: the verdict.
done_with() {
  [ "$failures" = 0 ] || { printf '%s failures\n' "$failures"; exit 1; }
  echo "$1: all as expected"
}
