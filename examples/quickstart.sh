#!/usr/bin/env bash
# examples/quickstart.sh [--wheel FILE] [ranks]: installs what is missing, builds the example, and trains it on 2 ranks, or on the
# number given. With a wheel of Sirtaki (scripts/build_wheel.sh) only the example is compiled. A second run builds nothing and starts
# at once.
set -euo pipefail
wheel=
if [ "${1:-}" = --wheel ]; then
  wheel=$(realpath "${2:?--wheel needs the path of a wheel}")
  shift 2
fi
ranks=${1:-2}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || { echo "quickstart.sh: '$ranks' is no number of ranks" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=$(mktemp)
trap 'rm -f "$log"' EXIT
if [ -n "$wheel" ]; then
  bash bootstrap.sh --wheel="$wheel"
  export PATH=$PWD/.venv/bin:$PATH
  build=build/wheel-examples
  cmake -S examples -B "$build" -G Ninja -DCMAKE_PREFIX_PATH="$(python -m sirtaki --cmake-prefix-path)" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
  cmake --build "$build" --target train_digits
  command=(sirtakirun)
  program=$build/train_digits
else
  bash bootstrap.sh
  # The build folder is the tests' as well, so nothing is built twice; only what the example needs is built here.
  cmake --preset release >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
  cmake --build --preset release -j "${SIRTAKI_JOBS:-$(nproc)}" --target train_digits sirtakirun
  command=(build/release/sirtakirun)
  program=build/release/examples/train_digits
fi

# --oversubscribe lets it run on fewer cores as well.
command+=(-np "$ranks" --oversubscribe "$program")
echo "+ ${command[*]}"
"${command[@]}"
