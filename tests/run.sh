#!/usr/bin/env bash
# tests/run.sh [-D...] [ctest arguments]: installs what is missing, builds everything, with these -D of CMake's, and runs the
# tests.
#   bash tests/run.sh              the tests of every change
#   bash tests/run.sh -L unit      the quick ones; -R, -E, -j and the rest of ctest's arguments work too
# It ends with the ten slowest tests and the time that building and running took. What takes longer is in tests/full.sh.
# SIRTAKI_JOBS: how many compilers at once (default: the cores). SIRTAKI_CUDA and SIRTAKI_UNITY, as cmake takes them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${SIRTAKI_JOBS:-$(nproc)}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
defines=(-DSIRTAKI_UNITY="${SIRTAKI_UNITY:-ON}" ${SIRTAKI_CUDA:+"-DSIRTAKI_CUDA=$SIRTAKI_CUDA"})
while [[ ${1:-} == -D* ]]; do
  defines+=("$1")
  shift
done

bash bootstrap.sh --python
begin=$SECONDS
cmake --preset release "${defines[@]}"
cmake --build --preset release -j "$jobs"
built=$SECONDS

# One test more than cores: tests of whole jobs wait for their ranks most of the time.
output=$(mktemp)
trap 'rm -f "$output"' EXIT
code=0
ctest --preset release -j $((jobs + 1)) "$@" | tee "$output" || code=$?
ran=$SECONDS
printf '\nThe slowest tests, in seconds:\n'
sed -nE 's|^ *[0-9]+/[0-9]+ +Test +#[0-9]+: ([^ ]+).* ([0-9.]+) sec *$|\2 \1|p' "$output" | sort -rn |
  awk 'NR <= 10 { printf "%8.1f  %s\n", $1, $2 }'   # not head, which sort could die of
printf 'Building took %d s, the tests %d s.\n' $((built - begin)) $((ran - built))
exit "$code"
