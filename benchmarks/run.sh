#!/usr/bin/env bash
# benchmarks/run.sh [--json FILE] [--full] [NAME...]: builds the benchmarks and prints one table of ours beside the
# references of the same run. `--help` lists the works. `--build FOLDER`: uses what was built there, builds nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case " $* " in
  *" --build"* | *" --help "* | *" -h "*) ;;
  *)
    bash bootstrap.sh --quiet
    cmake --preset release >/dev/null
    cmake --build --preset release -j "${SIRTAKI_JOBS:-$(nproc)}" --target sirtaki_benchmarks >&2
    ;;
esac
exec python3 benchmarks/driver "$@"
