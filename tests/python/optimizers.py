"""Every optimizer of torch.optim, found and not listed, with a model that suits it."""

import inspect

import torch
from torch import nn

import support


def names():
    return sorted(name for name in dir(torch.optim)
                  if inspect.isclass(getattr(torch.optim, name)) and name != "Optimizer"
                  and issubclass(getattr(torch.optim, name), torch.optim.Optimizer))


class Table(nn.Module):
    """With a sparse gradient: of batches the first column chooses the rows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=True, dtype=torch.float64)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(60, dtype=torch.float64).reshape(20, 3) / 30 - 1)

    def forward(self, x):
        return self.table((x[:, 0].abs() * 10).long() % 20)


def model_for(name, seed=0):
    if name == "SparseAdam":
        return Table()
    model = support.net(seed, torch.float64)
    if name == "Muon":  # of matrices only
        for layer in (model[0], model[2]):
            layer.bias = None
    return model


def make(name, parameters, lr=0.02):
    kwargs = {"momentum": 0.9} if name == "SGD" else {}
    if name == "LBFGS":
        kwargs, lr = {"max_iter": 3}, 0.5
    return getattr(torch.optim, name)(parameters, lr=lr, **kwargs)


def step(name, model, optimizer, batch):
    batch = tuple(part.double() for part in batch)

    def closure():
        optimizer.zero_grad()
        loss = support.loss_of(model, batch)
        loss.backward()
        return loss

    if name == "LBFGS":
        return optimizer.step(closure)
    loss = closure()
    optimizer.step()
    return loss
