"""low_rank.py MODULE EPOCHS: trains on the digits with whole gradients and with PowerSGD of rank 2, by ours with the hook of
examples/python/powersgd.py and under DistributedDataParallel over gloo with torch's hook. The four take each step in turn, from
the same start and with the same batches. EPOCHS: those after the learning rate has risen. ../hosts.sh makes the hosts."""

import datetime
import os
import random
import statistics
import sys
import time
import types

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(1, os.path.join(TOP, "examples", "python"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as reference  # noqa: E402

import lines  # noqa: E402
import train_digits  # noqa: E402
from lines import hvd  # noqa: E402
from powersgd import PowerSGD  # noqa: E402

RANK, BATCH, RISING = 2, 32, 2  # RISING: epochs until the learning rate is reached, and with it PowerSGD begins
WHOLE, FACTORS = "whole gradients", f"PowerSGD, rank {RANK}"


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                         nn.Linear(1024, 10))


MODELS = {"digits' net, 0.24 MB": train_digits.Net, "MLP, 4.5 MB": mlp}


class Seeds(random.Random):
    def randint(self, end):
        return self.randrange(end)


def hook_of_ddp(start):
    """DDP's hook takes nothing of numpy but a generator of seeds."""
    try:
        import numpy  # noqa: F401
    except ImportError:
        sys.modules["numpy"] = types.SimpleNamespace(random=types.SimpleNamespace(RandomState=Seeds))
    return reference.PowerSGDState(None, RANK, start_powerSGD_iter=start), reference.powerSGD_hook


class Trainer:
    """One model with its optimizer, and what its steps have taken and lost."""

    def __init__(self, make, steps, epochs, compressed):
        torch.manual_seed(1)
        self.module = make()
        lr = train_digits.LEARNING_RATES["sgd"] * hvd.size()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr, momentum=0.9)
        self.prepare(RISING * steps, compressed)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, train_digits.warmup_cosine(RISING * steps, (epochs + 1) * steps, hvd.size()))
        self.seconds, self.losses = [], []

    def step(self, images, classes):
        hvd.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.module(images), classes)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(loss.item())
        self.scheduler.step()


class Ours(Trainer):
    def prepare(self, start, compressed):
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=self.module.named_parameters(),
                                                  communication_hook=PowerSGD(RANK, start) if compressed else None)
        hvd.broadcast_parameters(self.module.state_dict(), root_rank=0)


class OfDDP(Trainer):
    def prepare(self, start, compressed):
        # Gradients only, as ours. DDP's hook begins the collectives of several buckets in an order of each rank's own, with
        # which gloo fails or hangs: all gradients are then in one, which a limit that is given makes of them.
        self.module = nn.parallel.DistributedDataParallel(self.module, broadcast_buffers=False,
                                                          bucket_cap_mb=25 if compressed else None)
        if compressed:
            self.module.register_comm_hook(*hook_of_ddp(start))


VARIANTS = {(WHOLE, "ours"): (Ours, False), (FACTORS, "ours"): (Ours, True),
            (WHOLE, "DistributedDataParallel, gloo"): (OfDDP, False),
            (FACTORS, "DistributedDataParallel, gloo"): (OfDDP, True)}


def measure(title, make, epochs):
    (images, classes), _ = train_digits.split(train_digits.read_samples(train_digits.DATA), 1)
    sampler = torch.utils.data.distributed.DistributedSampler(images, hvd.size(), hvd.rank(), seed=1, drop_last=True)
    steps = len(sampler) // BATCH
    trainers = [kind(make, steps, epochs, compressed) for kind, compressed in VARIANTS.values()]
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        rows = torch.tensor(list(sampler)[:steps * BATCH]).split(BATCH)
        for turn, batch in enumerate(rows):
            for i in range(len(trainers)):
                trainers[(i + turn) % len(trainers)].step(images[batch], classes[batch])
    medians = {}
    for (how, variant), trainer in zip(VARIANTS, trainers):
        medians[how, variant] = statistics.median(lines.slowest(trainer.seconds[RISING * steps:])) * 1e3
        loss = hvd.metric_average(statistics.mean(trainer.losses[-steps:]), name="loss")
        lines.emit(f"{title}, {how}: step", medians[how, variant], "ms", variant)
        lines.emit(f"{title}, {how}: loss of the last epoch", loss, "", variant)
    lines.emit(f"{title}, {FACTORS}: step", medians[WHOLE, "ours"], "ms", f"ours, {WHOLE}")


def main():
    epochs = RISING + int(lines.ARGUMENTS[0])
    hvd.init()
    dist.init_process_group("gloo", init_method="tcp://h1:29500", rank=hvd.rank(), world_size=hvd.size(),
                            timeout=datetime.timedelta(minutes=1))
    for title, make in MODELS.items():
        measure(title, make, epochs)
    dist.destroy_process_group()
    hvd.shutdown()


main()
