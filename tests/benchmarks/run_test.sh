#!/usr/bin/env bash
# run_test.sh BUILD: benchmarks/run.sh prints a table and writes the JSON that it promises, of works that cost
# little; those on GPUs are listed as skipped where there is none, and so is Horovod; a name that is not known is refused.
set -euo pipefail
build=${1:?usage: run_test.sh BUILD}
scratch=$(mktemp -d)
json=$scratch/table.json
trap 'rm -rf "$scratch"' EXIT
export PYTHONDONTWRITEBYTECODE=1

if bash benchmarks/run.sh --build "$build" nonsense 2>"$json"; then
  echo "an unknown name was accepted" >&2
  exit 1
fi
grep -q "no work is called 'nonsense'" "$json"

# Horovod is missing, or a name for our module that knows Horovod's calls: what runs is the reference's program.
python3 - "$scratch" "$build" <<'PYTHON'
import os
import shlex
import sys

sys.path.insert(0, "benchmarks/driver")
import launch

scratch, build = sys.argv[1:]
os.environ.pop("SIRTAKI_BENCH_HOROVOD", None)
assert launch.python_with_horovod() == (None, "SIRTAKI_BENCH_HOROVOD names no Python that imports horovod.torch")
for python in ("/no/such/python", "/bin/false"):
    os.environ["SIRTAKI_BENCH_HOROVOD"] = python
    command, why = launch.python_with_horovod()
    assert command is None and python in why, why

command, environment, why = launch.python_with_torch()
if not why:
    os.mkdir(f"{scratch}/horovod")
    open(f"{scratch}/horovod/__init__.py", "w").close()
    with open(f"{scratch}/horovod/torch.py", "w") as file:
        file.write("from sirtaki.torch import *\n")
    paths = [scratch, f"{build}/python", environment.get("PYTHONPATH", "")]
    with open(f"{scratch}/python", "w") as file:
        file.write("#!/bin/sh\n"
                   f"export PYTHONPATH={shlex.quote(':'.join(paths))}\n"
                   f"export LD_LIBRARY_PATH={shlex.quote(environment.get('LD_LIBRARY_PATH', ''))}\n"
                   f'exec {shlex.quote(command[0])} "$@"\n')
    os.chmod(f"{scratch}/python", 0o755)
PYTHON
unset SIRTAKI_BENCH_HOROVOD
if [ -x "$scratch/python" ]; then export SIRTAKI_BENCH_HOROVOD=$scratch/python; fi

output=$(bash benchmarks/run.sh --build "$build" --tiny --json "$json" \
  latency control sharded submission gpu_resnet50 gpu_pack gpu_vectors)
printf '%s\n' "$output"
if ! [ -x "$scratch/python" ]; then grep -q '^skipped: .*Horovod.*: SIRTAKI_BENCH_HOROVOD' <<<"$output"; fi
# Each on a GPU or in Python is measured, or listed with the reason.
for work in submission=submitting gpu_resnet50=ResNet-50 gpu_pack=pack gpu_vectors=all-reduce; do
  if ! grep -qE "^${work#*=} " <<<"$output" && ! grep -qE "^skipped: .*${work%=*}.*: ." <<<"$output"; then
    echo "${work%=*} was neither measured nor skipped" >&2
    exit 1
  fi
done
HAS_TORCH=$(grep -q '^skipped: .*peers of sharded optimizers' <<<"$output" || echo yes) \
  HAS_MODULE=$(grep -q '^submitting ' <<<"$output" && echo yes || true) python3 - "$json" <<'PYTHON'
import json
import math
import os
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
if os.environ["HAS_MODULE"]:
    assert ("synchronous all-reduce of 4 B", "Horovod") in found, found
    assert ("synchronous all-reduce of 4 B", "ours, in Python") in found, found
assert ("synchronous all-reduce of 4 B", "MPI_Allreduce") in found, found
sharded = {row["reference"]: row for row in rows if row["work"].endswith("(loop), sharded state: step")}
assert sharded["ours, unsharded (loop)"]["ratio"] > 0, sharded
if os.environ["HAS_TORCH"]:
    assert sharded["DistributedDataParallel"]["ratio"] > 0, sharded
    failed = [row for name, row in sharded.items() if "overlap_with_ddp: RuntimeError: " in name]
    assert len(failed) == 1 and failed[0]["reference_value"] is None, sharded
negotiation = [row for row in rows if row["unit"] == "messages" and row["reference"] == "16 ranks"]
assert {row["ranks"] for row in negotiation} == {16, 256}, negotiation
PYTHON
