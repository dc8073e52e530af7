"""Batches larger than memory: the gradients of several passes add up to one step, and travel once.

    sirtakirun -np 2 python accumulation.py
"""

import argparse

import torch
from torch import nn

import sirtaki.torch as hvd


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))


def as_declared(batches, passes):
    """Makes the same number of passes for each step."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model.named_parameters(),
                                         backward_passes_per_step=passes)
    for begin in range(0, len(batches), passes):
        optimizer.zero_grad()
        for batch in batches[begin:begin + passes]:
            (loss_of(model, batch) / passes).backward()  # passes add up: divide for the mean
        optimizer.step()
    return model


def as_it_comes(batches, passes):
    """Makes another number of passes for each step: the gradients of all but the last stay on this rank until then."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model.named_parameters())
    for begin in range(0, len(batches), passes):
        optimizer.zero_grad()
        with optimizer.no_sync():
            for batch in batches[begin:begin + passes - 1]:
                (loss_of(model, batch) / passes).backward()
        (loss_of(model, batches[begin + passes - 1]) / passes).backward()
        optimizer.step()
    return model


def at_least_one(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {value}, and must be 1 or more")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=at_least_one, default=4, help="of a step (4)")
    parser.add_argument("--steps", type=at_least_one, default=25)
    arguments = parser.parse_args()
    hvd.init()
    generator = torch.Generator().manual_seed(hvd.rank())  # this rank's data
    batches = [torch.randn(8, 16, generator=generator) for _ in range(arguments.passes * arguments.steps)]
    one, other = as_declared(batches, arguments.passes), as_it_comes(batches, arguments.passes)
    hvd.check_parameters(one)
    hvd.check_parameters(other)
    apart = max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters()))
    loss = hvd.metric_average(loss_of(one, batches[-1]).item(), name="loss")
    if hvd.rank() == 0:
        print(f"loss {loss:.4f} after {arguments.steps} steps of {arguments.passes} passes on {hvd.size()} ranks; "
              f"the two ways differ by {apart:.1e}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
