#!/usr/bin/env bash
# job_faults_test.sh PYTHON...: the tests of job_faults.py, each in a job of 2 and of 3 ranks, which mpirun reports as
# failed: what counts is what each rank says.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=$(mktemp)
trap 'rm -f "$output"' EXIT
failures=0
for ranks in 2 3; do
  for test in $(sed -n 's/^def \(test_[a-z_]*\).*/\1/p' "$here/job_faults.py"); do
    SIRTAKI_TEST_SECONDS=${SIRTAKI_TEST_SECONDS:-100} bash "$here/../support/mpirun.sh" "$ranks" \
      "$@" -m pytest -q "$here/job_faults.py" -k "$test" --rootdir "$here" >"$output" 2>&1 || true
    # Every rank ends with its verdict; conftest.py has each print one.
    if [ "$(grep -c 'verdict of rank [0-9]*: 1 passed$' "$output")" = "$ranks" ]; then
      printf '%s on %s ranks: as expected\n' "$test" "$ranks"
    else
      printf 'FAILED: %s on %s ranks\n' "$test" "$ranks"
      sed 's/^/    /' "$output"
      failures=$((failures + 1))
    fi
  done
done
[ "$failures" = 0 ]
