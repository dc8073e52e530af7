#!/usr/bin/env bash
# The table of cases for every backend, a part of it by seed, on two hosts of two ranks, or on three that are not alike.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
# shellcheck source=tests/support/sample.sh
. "$(dirname "$0")/../support/sample.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}/..

[ -x "$bindir/sirtaki_conformance_mpi_tests" ] || hosts_skip 'built without LibTorch'
hosts_up 3
suites="CollectivesMpiTest $(sample 1 WrongCallMpiTest,MismatchMpiTest JoinMpiTest | tr '\n' ' ')"
if full; then SIRTAKI_TEST_SCALE=1; fi   # what it is on one host
export SIRTAKI_TEST_SCALE=${SIRTAKI_TEST_SCALE:-0.05}
# By a seed of their own, or the same suites would meet the same hosts each time.
for shape in $(SIRTAKI_TEST_SEED=$((SIRTAKI_TEST_SEED / 7)) sample 1 h1:2,h2:2 h1:1,h2:2,h3:1); do
  for suite in $suites; do
    printf '== %s on %s\n' "$suite" "$shape"
    across "$shape" "$bindir/sirtaki_conformance_mpi_tests" --gtest_filter="*${suite//,/.*:*}.*"
  done
done
