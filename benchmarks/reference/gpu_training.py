"""gpu_training.py MEETING BATCH SIDE STEPS ROUNDS: steps of ResNet-50 on a GPU under DistributedDataParallel over NCCL,
beside bare ones.

The model, the optimizer, the data and what is timed are those of gpu_training.cc. Ends with code 77 and the reason if
there is no GPU.
"""

import os
import statistics
import sys
import time

import ranks
import torch
import torch.distributed as dist
from torch import nn


def convolution(inputs, outputs, kernel, stride=1):
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(convolution(inputs, 4 * width, 1, stride), nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = torch.relu_(self.bn1(self.conv1(x)))
        y = torch.relu_(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return torch.relu_(y)


def resnet50():
    layers = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, 64 << stage, 2 if stage > 0 and block == 0 else 1))
            inputs = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Trainer:
    def __init__(self, device, batch, side, bfloat16, wrapped):
        torch.manual_seed(0)
        self.model = resnet50().to(device)
        if wrapped:
            self.model = nn.parallel.DistributedDataParallel(
                self.model, device_ids=[device.index], broadcast_buffers=False)   # as ours: gradients only
        # The step goes parameter by parameter, as LibTorch's optimizers make it.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, foreach=False)
        self.images = torch.randn(batch, 3, side, side, device=device)
        self.targets = torch.randint(1000, (batch,), device=device)
        self.bfloat16 = bfloat16

    def step(self):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.bfloat16):
            logits = self.model(self.images)
        nn.functional.cross_entropy(logits.float(), self.targets).backward()
        self.optimizer.step()


def on_device(trainer, steps):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    begin.record()
    for _ in range(steps):
        trainer.step()
    end.record()
    end.synchronize()
    return slowest(begin.elapsed_time(end) / steps)


def on_host(trainer, steps):
    seconds = 0
    for _ in range(steps):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        trainer.step()
        seconds += time.perf_counter() - begin
    return slowest(seconds * 1e6 / steps)


def slowest(value):
    worst = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def medians(measure, trainers, steps, rounds):
    values = [[] for _ in trainers]
    for trainer in trainers:
        measure(trainer, steps)
    for turn in range(rounds):
        for i in range(len(trainers)):
            i = (i + turn) % len(trainers)
            values[i].append(measure(trainers[i], steps))
    return [statistics.median(of_one) for of_one in values]


def main():
    meeting, batch, side, steps, rounds = sys.argv[1], *map(int, sys.argv[2:6])
    device, where = ranks.start_on_gpus(meeting)
    for bfloat16 in (False, True):
        trainers = [Trainer(device, batch, side, bfloat16, wrapped) for wrapped in (True, False)]
        ddp, bare = medians(on_device, trainers, steps, rounds)
        work = f"ResNet-50, batch {batch}, {'bfloat16' if bfloat16 else 'float32'}{where}: step"
        ranks.emit(work, "DistributedDataParallel, NCCL", ddp, "ms")
        ranks.emit(work, "bare step, Python", bare, "ms")
        del trainers
    if ranks.SIZE > 1:
        trainers = [Trainer(device, 2, 32, False, wrapped) for wrapped in (True, False)]
        ddp, bare = medians(on_host, trainers, steps, rounds)
        ranks.emit(f"ResNet-50{where}: host time of a step", "DistributedDataParallel, NCCL", ddp, "us")
        ranks.emit(f"ResNet-50{where}: host time of a step", "bare step, Python", bare, "us")
    dist.barrier()
    os._exit(0)


main()
