"""What the benchmarks of Python modules share: the module that they are told, ours or Horovod's, whose calls are the same,
and the lines that the driver reads."""

import importlib
import json
import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402

VARIANTS = {"sirtaki.torch": "ours, in Python", "horovod.torch": "Horovod"}

hvd = importlib.import_module(sys.argv[1])
VARIANT = VARIANTS[sys.argv[1]]
ARGUMENTS = sys.argv[2:]

torch.set_num_threads(1)


def slowest(values):
    """Each value of the rank that had the largest."""
    return hvd.allgather(torch.tensor([values], dtype=torch.float64), name="slowest").amax(0).tolist()


def emit(work, value, unit, variant=VARIANT):
    if hvd.rank() == 0:
        print(json.dumps({"work": work, "ranks": hvd.size(), "variant": variant, "value": value, "unit": unit}), flush=True)
