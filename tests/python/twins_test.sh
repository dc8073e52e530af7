#!/usr/bin/env bash
# twins_test.sh PROGRAM PYTHON...: twin.cc and twin.py print the same digests, on two of 1 to 4 ranks by seed,
# with SIRTAKI_TEST_SCALE=full on all.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=$1
shift
# shellcheck source=tests/support/sample.sh
. "$here/../support/sample.sh"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export SIRTAKI_DETERMINISTIC=1   # two runs are compared: see docs/training.md, "Resume"
for ranks in $(sample 2 1 2 3 4); do
  bash "$here/../support/mpirun.sh" "$ranks" "$program" >"$scratch/cc"
  bash "$here/../support/mpirun.sh" "$ranks" "$@" "$here/twin.py" >"$scratch/py"
  [ "$(wc -l <"$scratch/cc")" = 31 ] || { echo "FAILED: not 31 lines of the C++ program"; cat "$scratch/cc"; exit 1; }
  diff "$scratch/cc" "$scratch/py" || { echo "FAILED: they differ on $ranks ranks"; exit 1; }
  echo "$ranks ranks: $(tail -n 1 "$scratch/py"), the same"
done
