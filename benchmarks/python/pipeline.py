"""pipeline.py sirtaki.torch BATCH STEPS: steps of the MLP as a pipeline, as ../pipelining.cc makes them by C++ and
../reference/pipeline.py over torch.distributed."""

import os
import statistics
import sys
import time

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "reference"))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import lines  # noqa: E402
import models  # noqa: E402
from lines import hvd  # noqa: E402

WARM_UP = 4


def main():
    batch, steps = int(lines.ARGUMENTS[0]), int(lines.ARGUMENTS[1])
    hvd.init()
    torch.manual_seed(0)
    pipeline = hvd.Pipeline(models.mlp(), nn.functional.mse_loss, micro_batches=8)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
    torch.manual_seed(1)
    inputs, targets = torch.randn(batch, 2048), torch.randn(batch, 2048)
    times = []
    for step in range(WARM_UP + steps):
        hvd.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        pipeline.train_batch(inputs, targets)
        optimizer.step()
        if step >= WARM_UP:
            times.append(time.perf_counter() - begin)
    lines.emit("step", statistics.median(lines.slowest(times)) * 1e3, "ms")
    hvd.shutdown()


main()
