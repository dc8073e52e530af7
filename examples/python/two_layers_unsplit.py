"""Trains two layers with Adam, by accumulation:

    python two_layers_unsplit.py

two_layers_pipeline.py is the same program for two ranks.
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--micro-batches", type=int, default=8, help="of a batch")
parser.add_argument("--steps", type=int, default=100)
arguments = parser.parse_args()

torch.manual_seed(1)
first = nn.Sequential(nn.Linear(16, 128), nn.ReLU())
second = nn.Linear(128, 4)
model = nn.Sequential(first, second)
loss_of = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(arguments.steps):
    inputs = torch.randn(arguments.batch_size, 16)
    targets = inputs.view(-1, 4, 4).square().mean(2)
    optimizer.zero_grad()
    loss = 0.0
    for some, wanted in zip(inputs.chunk(arguments.micro_batches), targets.chunk(arguments.micro_batches)):
        part = loss_of(model(some), wanted) / arguments.micro_batches
        part.backward()
        loss += part.item()
    optimizer.step()
    if (step + 1) % 20 == 0:
        print(f"step {step + 1}: loss {loss:.5f}", flush=True)
