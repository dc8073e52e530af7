"""What the benchmarks of the Python module share: the lines that the driver reads."""

import json

import torch

import sirtaki.torch as hvd

torch.set_num_threads(1)


def slowest(values):
    """Of each value that of the rank that had the largest."""
    return hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Max).tolist()


def emit(work, variant, value, unit):
    if hvd.rank() == 0:
        print(json.dumps({"work": work, "ranks": hvd.size(), "variant": variant, "value": value, "unit": unit}), flush=True)
