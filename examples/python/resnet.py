"""ResNets as a row of layers, which a pipeline can cut, without torchvision."""

import torch.nn.functional as F
from torch import nn


def convolution(inputs, outputs, kernel, stride=1):
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """Adds two convolutions to its input, or three of which the outer ones are 1 x 1."""

    def __init__(self, inputs, width, stride, deep):
        super().__init__()
        outputs = 4 * width if deep else width
        if deep:
            layers = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            layers = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        parts = []
        for layer in layers:
            parts += [convolution(*layer), nn.BatchNorm2d(layer[1]), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*parts[:-1])
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet(blocks, deep):
    layers = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inputs = 64
    for stage, number in enumerate(blocks):
        width = 64 << stage
        for i in range(number):
            layers.append(Block(inputs, width, 2 if stage > 0 and i == 0 else 1, deep))
            inputs = 4 * width if deep else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
