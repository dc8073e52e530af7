"""The twin of twin.cc, which see."""

import pathlib
import sys

import torch
from torch import nn

import sirtaki.torch as hvd

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples" / "python"))

from powersgd import PowerSGD  # noqa: E402


def digest(tensors):
    result = 14695981039346656037
    for tensor in tensors:
        for byte in tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist():
            result = ((result ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return result


def numbers(count, seed):
    places = torch.arange(count)
    return (places * 7919 + seed * 104729).remainder(2003).float() / 1001 - 1


def show(what, tensors):
    if hvd.rank() == 0:
        print(f"{what} {digest(tensors):016x}")


def show_powersgd(dtype):
    parameters = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in ((24, 2, 20), (4, 4), (24,), (30, 50))]
    powersgd = PowerSGD(2, start=2, seed=5)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), communication_hook=powersgd)
    for step in range(8):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=dtype)
        for i, parameter in enumerate(parameters):
            gradient = numbers(parameter.numel(), 300 + 40 * step + 10 * hvd.rank() + i).to(dtype)
            if step == 4 and hvd.rank() == 0:
                gradient[7] = float("nan")
            loss = loss + (parameter * gradient.reshape(parameter.shape)).sum()
        loss.backward()
        optimizer.synchronize()
        show("PowerSGD", [parameter.grad.nan_to_num() for parameter in parameters])
        if step == 5:
            powersgd.state_dict()


def main():
    hvd.init()
    torch.set_num_threads(1)
    rank = hvd.rank()
    model = nn.Sequential(nn.Linear(30, 200), nn.Linear(200, 150), nn.Linear(150, 5))
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters(), start=1):
            parameter.copy_(numbers(parameter.numel(), seed).reshape(parameter.shape) / 10)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
                                         named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(6):
        x = numbers(20 * 30, 100 + 10 * step + rank).reshape(20, 30)
        y = numbers(20 * 5, 200 + 10 * step + rank).reshape(20, 5)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.synchronize()
        show("gradients", [p.grad for p in model.parameters()])
        with optimizer.skip_synchronize():
            optimizer.step()
        show("parameters", list(model.parameters()))
    show("all-reduce", [hvd.allreduce(numbers(5000, rank), prescale_factor=0.3, postscale_factor=7.0)])
    show("Adasum", [hvd.allreduce(numbers(5000, rank), op=hvd.Adasum)])
    show("float16", [hvd.allreduce(numbers(5000, rank).half())])
    show_powersgd(torch.float32)
    show_powersgd(torch.float16)
    hvd.shutdown()


main()
