#!/usr/bin/env bash
# A rank that is killed while hosts reduce together: every other one, of its host and of the others, gets the error that
# names it.
set -euo pipefail
# shellcheck source=tests/multihost/hosts.sh
. "$(dirname "$0")/hosts.sh"
bindir=${1:?usage: bash SCRIPT FOLDER-OF-THE-PROGRAMS}/../faults

hosts_up 2
output=$hosts_state/output
export SIRTAKI_MPIRUN_FLAGS=--enable-recovery SIRTAKI_TEST_SECONDS=45
for victim in 1 2; do
  printf '== rank %s\n' "$victim"
  code=0
  across h1:2,h2:2 "$bindir/lose_a_rank" killed-large "$victim" --sirtaki-ping-interval=0.5 \
    --sirtaki-peer-timeout=2 >"$output" 2>&1 || code=$?
  case $code in 124 | 137) cat "$output"; echo 'FAILED: it does not end'; exit 1 ;; esac
  cat "$output"
  ! grep -q 'WRONG SUM' "$output"
  for rank in 0 1 2 3; do
    [ "$rank" = "$victim" ] || grep -qE "^rank $rank after [0-9]{1,4} ms: .*(rank $victim is lost|process of rank $victim )" "$output"
  done
done
