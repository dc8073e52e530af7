"""What the references over torch.distributed share: starting, timing, and the lines that the driver reads."""

import json
import os
import statistics
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)


def of_environment(*names):
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    sys.exit("started by mpirun?")


RANK = of_environment("OMPI_COMM_WORLD_RANK", "PMI_RANK")
SIZE = of_environment("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def start(meeting, backend="gloo"):
    """`meeting`: a file that is not there yet, through which the ranks find each other."""
    dist.init_process_group(backend, init_method="file://" + meeting, rank=RANK, world_size=SIZE)


def slowest(value):
    worst = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def timed(body):
    dist.barrier()
    begin = time.perf_counter()
    body()
    return slowest(time.perf_counter() - begin)


def emit(work, variant, value, unit):
    if RANK == 0:
        sample = {"work": work, "ranks": SIZE, "variant": variant, "value": value, "unit": unit}
        print(json.dumps(sample), flush=True)


def measure(works, variant, rounds, unit, scale, body):
    body()
    median = statistics.median(timed(body) for _ in range(rounds))
    for work in works:
        emit(work, variant, median * scale, unit)
