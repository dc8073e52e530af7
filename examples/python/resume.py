"""A run that goes on where it was interrupted, with elastic.TorchState within it and a file across it:

    sirtakirun -np 2 python resume.py --file run.pt --stop-after 3
    sirtakirun -np 2 python resume.py --file run.pt

Rank 0 writes the file and reads it; the other ranks get its contents. `sirtakirun --max-restarts 3` starts the program
again when a rank was lost, and the program goes on by itself.
"""

import argparse
import os

import torch
from torch import nn

import sirtaki.torch as hvd


def make_data(samples=512):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 8, generator=generator)
    return torch.utils.data.TensorDataset(x, x.square().sum(1, keepdim=True))


def load(file, state):
    """Reads the file on rank 0; state.sync() tells the others."""
    if hvd.rank() == 0 and os.path.exists(file):
        saved = torch.load(file)
        state.model.load_state_dict(saved["model"])
        state.optimizer.load_state_dict(saved["optimizer"])
        state.epoch = saved["epoch"]
        print(f"going on after epoch {state.epoch}", flush=True)


def save(file, state):
    """Writes the file, whole or not at all."""
    if hvd.rank() == 0:
        torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(),
                    "epoch": state.epoch}, file + ".new")
        os.replace(file + ".new", file)


@hvd.elastic.run
def train(state, data, arguments):
    last = min(arguments.epochs, arguments.stop_after or arguments.epochs)
    loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=state.sampler)
    while state.epoch < last:
        total = 0.0
        for batch, (x, y) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = nn.functional.mse_loss(state.model(x), y)
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(batch, len(x))
            total += loss.item()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()  # after an error the run goes back to this
        save(arguments.file, state)  # another run goes on from this
        loss = hvd.metric_average(total / len(loader), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: loss {loss:.4f}", flush=True)


def at_least_one(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {value}, and must be 1 or more")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", default="run.pt", help="where the run is kept (run.pt)")
    parser.add_argument("--epochs", type=at_least_one, default=6)
    parser.add_argument("--stop-after", type=int, default=0, help="ends after this epoch (0: never)")
    arguments = parser.parse_args()
    hvd.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 1e-3 * hvd.size()),
                                         named_parameters=model.named_parameters())
    data = make_data()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=hvd.elastic.ElasticSampler(data), epoch=0)
    load(arguments.file, state)
    state.sampler.set_epoch(state.epoch)
    train(state, data, arguments)
    hvd.check_parameters(model)
    if hvd.rank() == 0:
        total = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
        print(f"weights {total:.12f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
