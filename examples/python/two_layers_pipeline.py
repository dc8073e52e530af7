"""Trains two layers with Adam, by accumulation:

    sirtakirun -np 2 python two_layers_pipeline.py

two_layers_unsplit.py is the same program for one process.
"""

import argparse

import torch
from torch import nn

import sirtaki.torch as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--micro-batches", type=int, default=8, help="of a batch")
parser.add_argument("--steps", type=int, default=100)
arguments = parser.parse_args()

hvd.init()
torch.manual_seed(1)
first = nn.Sequential(nn.Linear(16, 128), nn.ReLU())
second = nn.Linear(128, 4)
loss_of = nn.MSELoss()
model = hvd.Pipeline([first, second], loss_of, micro_batches=arguments.micro_batches)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(arguments.steps):
    inputs = torch.randn(arguments.batch_size, 16)
    targets = inputs.view(-1, 4, 4).square().mean(2)
    optimizer.zero_grad()
    loss = model.train_batch(inputs, targets)
    optimizer.step()
    if (step + 1) % 20 == 0 and model.is_last:
        print(f"step {step + 1}: loss {loss:.5f}", flush=True)
