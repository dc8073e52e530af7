#!/usr/bin/env bash
# The table of cases for every backend, a part of it by seed, on two hosts of two ranks.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/support/sample.sh
. "$(dirname "$0")/../support/sample.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}/..

[ -x "$bindir/sirtaki_conformance_mpi_tests" ] || hosts_skip 'built without LibTorch'
hosts_up 2
suites="CollectivesMpiTest $(sample 1 WrongCallMpiTest,MismatchMpiTest JoinMpiTest | tr '\n' ' ')"
if full; then SIRTAKI_TEST_SCALE=1; fi   # what it is on one host
export SIRTAKI_TEST_SCALE=${SIRTAKI_TEST_SCALE:-0.05}
for suite in $suites; do
  printf '== %s\n' "$suite"
  across h1:2,h2:2 "$bindir/sirtaki_conformance_mpi_tests" --gtest_filter="*${suite//,/.*:*}.*"
done
