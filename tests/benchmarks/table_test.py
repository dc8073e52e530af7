"""The driver's rows: medians, ratios that are above 1 when ours is better, and a text without what repeats."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "benchmarks", "driver"))

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
rows = samples.rows()
assert [(row["work"], row["reference"], row["value"], row["ratio"]) for row in rows] == [
    ("a cost", "MPI", 2.0, 3.0), ("a cost", "gloo", 2.0, 0.5), ("a rate", "memcpy", 8.0, 2.0),
    ("nothing to compare with", None, 1.0, None)], rows
assert table.ratio("ms", 0, 1.0) is None
lines = table.text(rows)
assert len(lines) == 5 and lines[2].split() == ["gloo", "1", "0.50"], lines
