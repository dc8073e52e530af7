"""training.py MODULE MODEL BATCH STEPS: steps of training by sirtaki.torch or horovod.torch, as ../training.cc and
../reference/training.py make them by C++ and under DistributedDataParallel."""

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
    name, batch, steps = lines.ARGUMENTS[0], int(lines.ARGUMENTS[1]), int(lines.ARGUMENTS[2])
    hvd.init()
    torch.manual_seed(0)
    model = models.mlp() if name == "mlp" else models.resnet18()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
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
    lines.emit("step", statistics.median(lines.slowest(times)) * 1e3, "ms")
    hvd.shutdown()


main()
