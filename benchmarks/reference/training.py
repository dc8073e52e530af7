"""training.py MEETING MODEL BATCH STEPS: steps of training under DistributedDataParallel over gloo.

The models, the optimizer and the data are those of training.cc.
"""

import os
import statistics
import sys
import time

import models
import ranks
import torch
import torch.distributed as dist
from torch import nn

WARM_UP = 4


def main():
    meeting, name, batch, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    ranks.start(meeting)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(models.mlp() if name == "mlp" else models.resnet18(),
                                                broadcast_buffers=False)   # as ours: gradients only
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(batch, 2048) if name == "mlp" else torch.randn(batch, 3, 112, 112)
    targets = torch.randint(2048 if name == "mlp" else 1000, (batch,))
    times = []
    for step in range(WARM_UP + steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if step >= WARM_UP:
            times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ranks.emit("step", "ddp", statistics.median(slowest.tolist()) * 1e3, "ms")
    dist.barrier()
    os._exit(0)


main()
