#!/usr/bin/env bash
# examples/quickstart.sh [ranks]: installs what is missing, builds the example, and trains it on 2 ranks, or on the
# number given. A second run builds nothing and starts at once.
set -euo pipefail
ranks=${1:-2}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || { echo "quickstart.sh: '$ranks' is no number of ranks" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash bootstrap.sh
# The build folder is the tests' as well, so nothing is built twice; only what the example needs is built here.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cmake --preset release >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
cmake --build --preset release -j "${SIRTAKI_JOBS:-$(nproc)}" --target train_digits sirtakirun

# --oversubscribe lets it run on fewer cores as well.
command=(build/release/sirtakirun -np "$ranks" --oversubscribe build/release/examples/train_digits)
echo "+ ${command[*]}"
"${command[@]}"
