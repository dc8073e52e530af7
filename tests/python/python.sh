#!/usr/bin/env bash
# python.sh PYTHON BUILD ARGUMENT...: that Python, with the module of the build folder and what `import torch` and the
# tests need (bootstrap.sh --python puts it into .venv-bench). Exit code 77 if it cannot import them.
set -euo pipefail
python=$1
build=$2
shift 2
additions=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.venv-bench
export PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # threads that wait for each other's core take most of the time of a busy machine
# This tree's own Python, also where .venv is a link.
if [ "${additions%-bench}/bin" -ef "$(dirname "$python")" ] && [ -d "$additions" ]; then
  PYTHONPATH=$PYTHONPATH:$additions/packages
  export LD_LIBRARY_PATH=$additions/stubs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
# Looked at once a test, before the ranks start.
if [ -z "${SIRTAKI_TEST_PYTHON_WORKS:-}" ]; then
  if ! why=$("$python" -W ignore -c 'import torch, pytest' 2>&1); then
    printf 'skipped: %s cannot import torch and pytest: %s (bash bootstrap.sh --python)\n' "$python" "$(tail -n 1 <<<"$why")"
    exit 77
  fi
  export SIRTAKI_TEST_PYTHON_WORKS=yes
fi
if [ "$1" = with ]; then   # python.sh PYTHON BUILD with COMMAND...: a command that calls the Python itself
  shift
  exec "$@"
fi
exec "$python" "$@"
