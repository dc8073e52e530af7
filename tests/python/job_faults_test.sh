#!/usr/bin/env bash
# job_faults_test.sh PYTHON...: the tests of job_faults.py (two by seed, with SIRTAKI_TEST_SCALE=full all), each in a job of 3 ranks, which mpirun reports as failed: what
# counts is what each rank says.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/support/sample.sh
. "$here/../support/sample.sh"
folder=$(mktemp -d)
output=$folder/output
trap 'rm -rf "$folder"' EXIT
export JOB_FAULTS_FOLDER=$folder   # where the ranks find each other
failures=0
ranks=3
tests=$(sed -n 's/^def \(test_[a-z_]*\).*/\1/p' "$here/job_faults.py")
[ "$(wc -w <<<"$tests")" = 7 ] || { echo "FAILED: job_faults.py has other tests than these: $tests"; exit 1; }
# The first rank to end is not to take the others along.
case $("${MPIEXEC:-mpirun}" --version 2>&1) in
  *"Open MPI"* | *OpenRTE* | *PRRTE*) survive=--enable-recovery ;;
  *) survive= ;;
esac
# shellcheck disable=SC2086  # several
for test in $(sample 2 $tests); do
  SIRTAKI_MPIRUN_FLAGS=$survive SIRTAKI_TEST_SECONDS=${SIRTAKI_TEST_SECONDS:-250} bash "$here/../support/mpirun.sh" "$ranks" \
    "$@" -m pytest -q --color=no "$here/job_faults.py" -k "$test" --rootdir "$here" >"$output" 2>&1 || true
  # Every rank that lives ends with its verdict; conftest.py has each print one.
  case $test in *killed*) living=$((ranks - 1)) ;; *) living=$ranks ;; esac
  if [ "$(grep -c 'verdict of rank [0-9]*: 1 passed$' "$output")" = "$living" ]; then
    printf '%s: as expected\n' "$test"
  else
    printf 'FAILED: %s\n' "$test"
    sed 's/^/    /' "$output"
    failures=$((failures + 1))
  fi
done
[ "$failures" = 0 ]
