"""training.py MEETING MODEL BATCH STEPS: steps of training under DistributedDataParallel over gloo.

The models, the optimizer and the data are those of training.cc.
"""

import os
import resource
import statistics
import sys
import time

import ranks
import torch
import torch.distributed as dist
from torch import nn

WARM_UP = 4


def mlp():
    layers = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers)


def convolution(inputs, outputs, kernel, stride):
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = convolution(inputs, outputs, 3, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs, 3, 1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = torch.relu_(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return torch.relu_(y)


def resnet18():
    layers = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)]
    inputs = 64
    for stage in range(4):
        outputs = 64 << stage
        for block in range(2):
            layers.append(BasicBlock(inputs, outputs, 2 if stage > 0 and block == 0 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def main():
    meeting, name, batch, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    ranks.start(meeting)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(mlp() if name == "mlp" else resnet18(),
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
    peak = ranks.slowest(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    ranks.emit("peak memory", "ddp", peak, "MiB")
    dist.barrier()
    os._exit(0)


main()
