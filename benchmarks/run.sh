#!/usr/bin/env bash
# benchmarks/run.sh [ranks]: builds the benchmarks and runs all of them on 2 ranks, or as many as asked for.
set -euo pipefail
ranks=${1:-2}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || { echo "benchmarks/run.sh: '$ranks' is no number of ranks" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash bootstrap.sh
cmake --preset release >/dev/null
cmake --build --preset release -j "${SIRTAKI_JOBS:-$(nproc)}" --target sirtaki_benchmarks
here=build/release/benchmarks
"$here/micro" --benchmark_min_time=0.2
"$here/kernels"
"$here/single_rank_step"
bash tests/support/mpirun.sh "$ranks" "$here/collectives"
