"""Trains a ResNet-50 on made-up images, by micro-batches:

    sirtakirun -np 2 python resnet_pipeline.py

resnet_unsplit.py is the same program for one process.
"""

import argparse

import torch
from torch import nn

import sirtaki.torch as hvd
from resnet import resnet

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--image-size", type=int, default=64, help="pixels on each side, 32 or more")
parser.add_argument("--micro-batches", type=int, default=4, help="of a batch")
parser.add_argument("--steps", type=int, default=10)
arguments = parser.parse_args()

hvd.init()
torch.manual_seed(1)
classes = torch.arange(arguments.batch_size) % 4
images = torch.randn(arguments.batch_size, 3, arguments.image_size, arguments.image_size) + classes.view(-1, 1, 1, 1)
loss_of = nn.CrossEntropyLoss()
model = hvd.Pipeline(resnet([3, 4, 6, 3], deep=True), loss_of, micro_batches=arguments.micro_batches,
                     partition="time", sample=images.chunk(arguments.micro_batches)[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(arguments.steps):
    optimizer.zero_grad()
    loss = model.train_batch(images, classes)
    optimizer.step()
    if model.is_last:
        print(f"step {step + 1}: loss {loss:.5f}", flush=True)
