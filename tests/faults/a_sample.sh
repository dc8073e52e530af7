#!/usr/bin/env bash
# a_sample.sh FOLDER-OF-THE-PROGRAMS: one of the tests of lost ranks, or with SIRTAKI_TEST_SCALE=full all. For other ways in which
# ranks may talk, which variables choose.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/support/sample.sh
. "$here/../support/sample.sh"
for test in $(sample 1 killed_rank stopped_rank absent_rank killed_in_a_call shared_memory); do
  printf '== %s\n' "$test"
  bash "$here/${test}_test.sh" "$@"
done
