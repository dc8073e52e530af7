#!/usr/bin/env bash
# examples/quickstart.sh [ranks]: installs what is missing, builds the example, and trains it on 2 ranks, or as many as
# asked for. A second run builds nothing and starts at once.
set -euo pipefail
ranks=${1:-2}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || { echo "quickstart.sh: '$ranks' is no number of ranks" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash bootstrap.sh
# The same build folder as the tests', so neither builds twice; here only what the example needs.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cmake --preset release >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
cmake --build --preset release -j "${SIRTAKI_JOBS:-$(nproc)}" --target train_digits sirtakirun

# Also where there are fewer cores.
command=(build/release/sirtakirun -np "$ranks" --oversubscribe build/release/examples/train_digits)
echo "+ ${command[*]}"
"${command[@]}"
