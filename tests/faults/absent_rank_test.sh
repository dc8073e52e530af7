#!/usr/bin/env bash
# A rank that lives and answers but does not submit: late, not lost. A warning that names the tensor and
# the rank, and after the limit an error on every rank.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"

lose "" 3 absent 1 --sirtaki-ping-interval=0.2 --sirtaki-peer-timeout=30 --sirtaki-stall-warning=0.5 \
  --sirtaki-stall-limit=12
grep -E 'warning.*"step5".*not submitted by rank 1' "$output" || fail 'no warning'
grep -qE '"step5" has waited [1-9][0-9.]* m?s; .*; rank 1: last submitted "step4" [1-9][0-9.]* m?s ago' "$output" || fail 'the warning does not say what rank 1 did last'
for rank in 0 2; do expect $rank '"step5" has waited .* for rank 1, longer than stall_limit'; done
grep -qE '^victim 1: .*"step5" has waited .* for rank 1, longer than stall_limit' "$output" || fail 'rank 1 has no error'
