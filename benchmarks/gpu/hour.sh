#!/usr/bin/env bash
# hour.sh [--bundle FOLDER] [--out FOLDER] [--seconds N] [--limit N] [--mps] PART [STEP...]: what is to be seen on a machine with a
# GPU, in parts of less than ten minutes, with what bundle.sh made; steps.py has the steps, docs/benchmarks/gpu.md says how to use it.
exec python3 -B "$(dirname "${BASH_SOURCE[0]}")/hour.py" "$@"
