#!/usr/bin/env bash
# a_sample.sh COUNT "SCRIPT..." ARGUMENT...: runs so many of the scripts, chosen by seed, or with SIRTAKI_TEST_SCALE=full all, each with
# the arguments. A test of the first tier for scripts that are tests of the second.
set -euo pipefail
count=$1 scripts=$2
shift 2
# shellcheck source=tests/support/sample.sh
. "$(dirname "${BASH_SOURCE[0]}")/sample.sh"
# shellcheck disable=SC2086  # scripts are words
for script in $(sample "$count" $scripts); do
  printf '== %s\n' "$script"
  bash "$script" "$@"
done
