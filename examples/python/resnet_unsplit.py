"""Trains a ResNet-50 on made-up images, by micro-batches:

    python resnet_unsplit.py

resnet_pipeline.py is the same program for two ranks.
"""

import argparse

import torch
from torch import nn

from resnet import resnet

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--image-size", type=int, default=64, help="pixels on each side, 32 or more")
parser.add_argument("--micro-batches", type=int, default=4, help="of a batch")
parser.add_argument("--steps", type=int, default=10)
arguments = parser.parse_args()

torch.manual_seed(1)
classes = torch.arange(arguments.batch_size) % 4
images = torch.randn(arguments.batch_size, 3, arguments.image_size, arguments.image_size) + classes.view(-1, 1, 1, 1)
loss_of = nn.CrossEntropyLoss()
model = resnet([3, 4, 6, 3], deep=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(arguments.steps):
    optimizer.zero_grad()
    loss = 0.0
    for some, wanted in zip(images.chunk(arguments.micro_batches), classes.chunk(arguments.micro_batches)):
        part = loss_of(model(some), wanted) / arguments.micro_batches
        part.backward()
        loss += part.item()
    optimizer.step()
    print(f"step {step + 1}: loss {loss:.5f}", flush=True)
