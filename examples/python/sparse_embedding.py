"""An embedding with many rows: only the few rows that a batch touches travel.

    sirtakirun -np 2 python sparse_embedding.py
"""

import argparse

import torch
from torch import nn

import sirtaki.torch as hvd

WIDTH = 16


class Model(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, sparse=True)
        self.output = nn.Linear(WIDTH, 1)

    def forward(self, words):
        return self.output(self.table(words).mean(1))


def at_least_one(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {value}, and must be 1 or more")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=at_least_one, default=50000)
    parser.add_argument("--steps", type=at_least_one, default=40)
    parser.add_argument("--as-dense", action="store_true", help="the whole table travels instead, for comparison")
    arguments = parser.parse_args()
    hvd.init()
    torch.manual_seed(1)
    model = Model(arguments.rows)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    # Adagrad takes sparse and dense gradients; SparseAdam takes only sparse ones and would need a second optimizer.
    optimizer = hvd.DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1),
                                         named_parameters=model.named_parameters(),
                                         sparse_as_dense=arguments.as_dense)
    torch.manual_seed(100 + hvd.rank())  # this rank's data
    before = hvd.metrics()["bytes"]
    losses = []
    for _ in range(arguments.steps):
        words = torch.randint(1000, (32, 8))  # the common words are few
        wanted = (words % 2).float().mean(1, keepdim=True)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(words), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    hvd.check_parameters(model)
    first, last = (hvd.metric_average(value, name="loss") for value in (losses[0], losses[-1]))
    if hvd.rank() == 0:
        moved = (hvd.metrics()["bytes"] - before) / arguments.steps
        print(f"loss {first:.4f} to {last:.4f}; {moved / 2**20:.3f} MiB a step, the table has "
              f"{arguments.rows * WIDTH * 4 / 2**20:.1f} MiB", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
