"""Trains a small net in an elastic job, until a file says that it is enough. elastic_job.py starts it, and ends some of
its processes."""

import os
import signal
import sys
import time

import torch

import sirtaki.torch as hvd

SAMPLES = 60
BATCH = 2
MOST_RANKS = 4
STEPS_OF_COMMIT = 10  # where step() is called after each
PAUSE = 0.01  # between steps, so that some are left when a change comes


def say(*words):
    print(*words, flush=True)


def digest(model):
    return hash(tuple(float(x) for p in model.parameters() for x in p.detach().flatten()))


def main(enough, mode=""):
    """The mode "lost before run": a rank is lost when it has made what run() sets up; "fails": every time; "steps":
    step() is called in the place of most commits."""
    say("pid", os.getpid())
    hvd.init()
    torch.manual_seed(hvd.rank())  # only sync() makes the nets equal
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
                                         model.named_parameters())
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, trained=[],
                                   dealt=0, steps=0)

    if mode == "lost before run" and hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    @hvd.elastic.run
    def train(state):
        if mode == "fails":
            raise hvd.HorovodInternalError("on purpose")
        say("begins", hvd.rank(), hvd.size(), state.epoch, state.steps, digest(model))
        while not hvd.broadcast_object(os.path.exists(enough)):
            indices = list(sampler)
            state.dealt += 1
            for at in range(0, len(indices), BATCH):
                ours = indices[at:at + BATCH]
                trained = sum(hvd.allgather_object(ours), [])
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs[ours]), targets[ours]).backward()
                optimizer.step()
                sampler.record_batch(at // BATCH, len(ours))
                state.trained = state.trained + trained
                state.steps += 1
                time.sleep(PAUSE)
                if mode == "steps":
                    state.step()
                if mode != "steps" or state.steps % STEPS_OF_COMMIT == 0:
                    state.commit()
            check(state.trained, state.dealt)
            state.epoch += 1
            state.trained = []
            state.dealt = 0
            sampler.set_epoch(state.epoch)
            state.commit()
            if hvd.rank() == 0:
                say("epoch", state.epoch, hvd.size())
        return state.steps

    steps = train(state)
    try:
        train(state)
    except hvd.InvalidArgumentError as error:
        say("again:", error)
    say("ends", hvd.rank(), hvd.size(), steps, digest(model))


def check(trained, dealt):
    """Every sample of the epoch was trained; those that are there twice filled up the shares, fewer than ranks each time that
    they were dealt out."""
    missing = set(range(SAMPLES)) - set(trained)
    assert not missing, f"samples {sorted(missing)} were not trained"
    twice = len(trained) - SAMPLES
    assert twice <= (MOST_RANKS - 1) * dealt, f"{twice} samples were trained twice, and they were dealt out {dealt} times"


main(*sys.argv[1:])
