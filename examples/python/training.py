"""The parts that the training programs share, whatever their models and data."""

import math
import os
import sys

import torch

import sirtaki.torch as hvd

PROGRAM = os.path.splitext(os.path.basename(sys.argv[0]))[0]


# ---- settings ----

def count(least, most=None):
    def parse(text):
        value = int(text)
        if value < least or (most is not None and value > most):
            raise ValueError
        return value
    parse.__name__ = f"whole number of {least} or more" if most is None else f"whole number from {least} to {most}"
    return parse


def rate(text):
    value = float(text)
    if not (0 <= value < math.inf):
        raise ValueError
    return value


rate.__name__ = "number of 0 or more"


def check_agreed(settings):
    """Checks that all ranks agree: with different numbers of steps they would wait for each other."""
    mine = {name: value for name, value in vars(settings).items() if name not in ("data", "checkpoint")}
    for rank, other in enumerate(hvd.allgather_object(mine, name="settings")):
        for name, value in other.items():
            if value != mine[name]:
                sys.exit(f"{PROGRAM}: the ranks have different settings: {name} is {mine[name]} on rank "
                         f"{hvd.rank()}, {value} on rank {rank}")


def choose_device(name):
    if name == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    everywhere = all(hvd.allgather_object(gpus >= hvd.local_size(), name="GPUs"))
    if not everywhere:
        if name == "auto":
            return torch.device("cpu")
        sys.exit(f"{PROGRAM}: --device cuda: not every rank has a GPU of its own")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


# ---- training ----

def warmup_cosine(warmup_steps, all_steps, rise):
    """The factor of the learning rate, which rises from 1/rise to 1, then falls to zero along a cosine."""
    def factor(step):
        if step < warmup_steps:
            return 1 / rise + (1 - 1 / rise) * step / warmup_steps
        return 0.5 * (1 + math.cos(math.pi * min(1, (step - warmup_steps) / (all_steps - warmup_steps))))
    return factor


def digest(net):
    """A hash (FNV-1a) that changes with any bit of the parameters."""
    result = 14695981039346656037
    for parameter in net.parameters():
        for byte in parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist():
            result = ((result ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return result


def save(file, **state):
    """Rank 0 writes the file, whole or not at all."""
    if hvd.rank() == 0:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        torch.save(state, file + ".new")
        os.replace(file + ".new", file)
