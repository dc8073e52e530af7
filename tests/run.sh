#!/usr/bin/env bash
# tests/run.sh [ctest arguments]: installs what is missing, builds everything, runs the tests.
#   bash tests/run.sh              all of them
#   bash tests/run.sh -L unit      the quick ones; -R, -E, -j and the rest of ctest's arguments work too
# SIRTAKI_JOBS: how many compilers at once (default: the cores). SIRTAKI_CUDA and SIRTAKI_UNITY, as cmake takes them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${SIRTAKI_JOBS:-$(nproc)}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

bash bootstrap.sh --python
cmake --preset release ${SIRTAKI_CUDA:+"-DSIRTAKI_CUDA=$SIRTAKI_CUDA"} ${SIRTAKI_UNITY:+"-DSIRTAKI_UNITY=$SIRTAKI_UNITY"}
cmake --build --preset release -j "$jobs"
env -u SIRTAKI_CUDA -u SIRTAKI_UNITY ctest --preset release -j "$jobs" "$@"   # the library knows no such options
