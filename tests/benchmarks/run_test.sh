#!/usr/bin/env bash
# run_test.sh BUILD: benchmarks/run.sh prints a table and writes the JSON that it promises, of two works that cost
# little; those on GPUs are listed as skipped where there is none; a name that is not known is refused.
set -euo pipefail
build=${1:?usage: run_test.sh BUILD}
json=$(mktemp)
trap 'rm -f "$json"' EXIT

if bash benchmarks/run.sh --build "$build" nonsense 2>"$json"; then
  echo "an unknown name was accepted" >&2
  exit 1
fi
grep -q "no work is called 'nonsense'" "$json"

output=$(bash benchmarks/run.sh --build "$build" --tiny --json "$json" latency control submission gpu_resnet50 gpu_pack)
printf '%s\n' "$output"
# Each on a GPU or in Python is measured, or listed with the reason.
for work in submission=submitting gpu_resnet50=ResNet-50 gpu_pack=pack; do
  if ! grep -qE "^${work#*=} " <<<"$output" && ! grep -qE "^skipped: .*${work%=*}.*: ." <<<"$output"; then
    echo "${work%=*} was neither measured nor skipped" >&2
    exit 1
  fi
done
python3 - "$json" <<'PYTHON'
import json
import math
import sys

rows = json.load(open(sys.argv[1]))
fields = {"work": str, "ranks": int, "value": (int, float), "unit": str, "reference": (str, type(None)),
          "reference_value": (int, float, type(None)), "ratio": (int, float, type(None))}
for row in rows:
    assert set(row) == set(fields), row
    for field, types in fields.items():
        assert isinstance(row[field], types), (field, row)
    assert row["ranks"] >= 1 and row["value"] > 0, row
    if row["ratio"] is not None:
        better = row["reference_value"] / row["value"]
        assert math.isclose(row["ratio"], 1 / better if "/s" in row["unit"] else better, rel_tol=1e-6), row
found = {(row["work"], row["reference"]) for row in rows}
assert ("synchronous all-reduce of 4 B", "MPI_Allreduce") in found, found
negotiation = [row for row in rows if row["unit"] == "messages" and row["reference"] == "16 ranks"]
assert {row["ranks"] for row in negotiation} == {16, 256}, negotiation
PYTHON
