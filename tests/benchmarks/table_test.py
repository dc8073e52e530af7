"""The driver's rows: medians, ratios that are above 1 when ours is better, and a text without what repeats; and which
sharded optimizers and pipelines are compared."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "benchmarks", "driver"))

import pipelines  # noqa: E402
import sharding  # noqa: E402
import table  # noqa: E402

samples = table.Samples()
for value in (3.0, 1.0, 2.0):
    samples.add("a cost", 2, table.OURS, "ms", value)
samples.add("a cost", 2, "MPI", "ms", 6.0)
samples.add("a cost", 2, "gloo", "ms", 1.0)
samples.add("a rate", 1, table.OURS, "GB/s", 8.0)
samples.add("a rate", 1, "memcpy", "GB/s", 4.0)
samples.add("nothing to compare with", 1, table.OURS, "ms", 1.0)
samples.add("a reference alone", 1, "MPI", "ms", 1.0)
samples.add("a cost", 2, "other: it does not run here", "ms", None)
rows = samples.rows()
assert [(row["work"], row["reference"], row["value"], row["ratio"]) for row in rows] == [
    ("a cost", "MPI", 2.0, 3.0), ("a cost", "gloo", 2.0, 0.5),
    ("a cost", "other: it does not run here", 2.0, None), ("a rate", "memcpy", 8.0, 2.0),
    ("nothing to compare with", None, 1.0, None)], rows
assert table.ratio("ms", 0, 1.0) is None
lines = table.text(rows)
assert len(lines) == 6 and lines[2].split() == ["gloo", "1", "0.50"], lines
assert lines[3].split() == "other: it does not run here - -".split(), lines

samples = table.Samples()
for variant, time, memory in (("adam", 8.0, 150.0), ("adam-sharded", 4.0, 130.0), ("adam-sharded-fused", 2.0, 140.0),
                              ("ddp", 12.0, 800.0), ("ddp-fused", 6.0, 810.0), ("fsdp2-fused", 10.0, 700.0),
                              ("fsdp2-kept", 9.0, 720.0)):
    samples.add(f"{sharding.TITLE}: step", 2, variant, "ms", time)
    samples.add(f"{sharding.TITLE}: peak memory", 2, variant, "MiB", memory)
samples.add(f"{sharding.TITLE}: step", 2, "zero: it does not run here", "ms", None)
for variant, memory in (("vectors", 30.0), ("nothing", 500.0)):
    samples.add(f"{sharding.TITLE}: peak memory", 2, variant, "MiB", memory)
sharding.compare(samples.works, 2)
rows = {}
for row in samples.rows():
    rows.setdefault(row["work"].removeprefix(sharding.TITLE), {})[row["reference"]] = row["ratio"]
loop = {"ours, unsharded (loop)": 2.0, "DistributedDataParallel": 3.0, "FSDP2, reshard_after_forward=False": 2.25,
        "ZeroRedundancyOptimizer: it does not run here": None}
assert rows[" (loop), sharded state: step"] == loop, rows
assert rows[" (fused), sharded state: step"] == {
    "ours, unsharded (loop)": 4.0, "DistributedDataParallel": 3.0, "FSDP2": 5.0}, rows
assert rows[", the best of each side (sharded state, fused): step"] == {
    "ours, unsharded (loop)": 4.0, "DistributedDataParallel, fused": 3.0, "FSDP2, reshard_after_forward=False, loop": 4.5}, rows
assert rows[" (loop), sharded state: peak memory of all ranks, less that without a model"] == {
    "ours, unsharded (loop)": 1.2, "DistributedDataParallel": 3.0, "FSDP2, reshard_after_forward=False": 2.2}, rows
assert rows[", the best of each side (sharded state, loop): peak memory of all ranks"]["FSDP2, fused"] == 700 / 130, rows
assert not any(work.startswith(": ") for work in rows), rows

samples = table.Samples()
for names, variant, time in ((pipelines.OURS, table.OURS, 10.0), (pipelines.OURS, "unsent", 8.0), (pipelines.PEERS, "unsent", 16.0),
                             (pipelines.PEERS, "1f1b", 21.0), (pipelines.PEERS, "deepspeed: no such module", None)):
    sample = pipelines.named({"work": "step", "ranks": 1, "variant": variant, "unit": "ms", "value": time}, names)
    samples.add(sample["work"], sample["ranks"], sample["variant"], sample["unit"], sample["value"])
pipelines.compare(samples.works)
rows = {(row["work"], row["reference"]): (row["value"], row["ratio"]) for row in samples.rows()}
assert rows[pipelines.STEP, "DeepSpeed's PipelineModule: no such module"] == (10.0, None), rows
# 10 - 8 * 9 / 8 and 21 - 16 * 9 / 8
assert rows[f"{pipelines.TITLE}: time lost beyond the limit", "torch.distributed.pipelining, 1F1B"] == (1.0, 3.0), rows
