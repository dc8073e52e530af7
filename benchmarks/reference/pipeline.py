"""pipeline.py MEETING KIND BATCH STEPS: steps of the MLP with its layers divided among the ranks, a batch as 8 micro-batches.

Kinds: `1f1b` and `gpipe` are torch.distributed.pipelining over gloo, `deepspeed` is DeepSpeed's PipelineModule, and `unsent`
runs each rank's layers on as many micro-batches with nothing sent, which is what a pipeline without bubbles and messages
would take. A kind that does not run here writes its error in place of a time. The model is that of training.cc, with the
mean of the squares as loss; on one rank `unsent` is the whole model by accumulation.
"""

import os
import statistics
import sys
import time

import models
import ranks
import torch
import torch.distributed as dist
from torch import nn

WARM_UP = 4
MICRO_BATCHES = 8
WIDTH = 2048
RATE = 0.01


def layers_of_rank():
    """As many layers on each rank: all ranks compute alike."""
    torch.manual_seed(0)
    layers = list(models.mlp())
    count = len(layers) // ranks.SIZE
    return nn.Sequential(*layers[ranks.RANK * count:(ranks.RANK + 1) * count])


def data(batch):
    torch.manual_seed(1)
    return torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)


def unsent(batch):
    model = layers_of_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inputs, targets = data(batch)
    inputs.requires_grad_(ranks.RANK > 0)  # a later stage makes gradients for the one before it

    def step():
        optimizer.zero_grad()
        total = torch.zeros(())
        for given, wanted in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)):
            loss = nn.functional.mse_loss(model(given), wanted) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total
    return step


def by_torch(batch, schedule):
    from torch.distributed import pipelining
    model = layers_of_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inputs, targets = data(batch)
    stage = pipelining.PipelineStage(model, ranks.RANK, ranks.SIZE, torch.device("cpu"))
    pipeline = getattr(pipelining, schedule)(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)

    def step():
        optimizer.zero_grad()
        losses = []
        given = (inputs,) if ranks.RANK == 0 else ()
        if ranks.RANK == ranks.SIZE - 1:
            pipeline.step(*given, target=targets, losses=losses)
        else:
            pipeline.step(*given)
        optimizer.step()
        return torch.stack(losses).mean() if losses else torch.zeros(())
    return step


def by_deepspeed(batch):
    import deepspeed
    from deepspeed.pipe import PipelineModule
    os.environ.update(RANK=str(ranks.RANK), LOCAL_RANK=str(ranks.RANK), WORLD_SIZE=str(ranks.SIZE))
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    inputs, targets = data(batch)
    micro = batch // MICRO_BATCHES
    torch.manual_seed(0)
    model = PipelineModule(layers=list(models.mlp()), num_stages=ranks.SIZE, loss_fn=nn.functional.mse_loss,
                           partition_method="uniform")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(parameters, lr=RATE),
        config={"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": MICRO_BATCHES, "steps_per_print": 1 << 30})
    pairs = list(zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)))
    return lambda: engine.train_batch(iter(pairs))


KINDS = {"unsent": unsent,
         "1f1b": lambda batch: by_torch(batch, "Schedule1F1B"),
         "gpipe": lambda batch: by_torch(batch, "ScheduleGPipe"),
         "deepspeed": by_deepspeed}


def train(kind, batch, steps):
    """The time of each step on the slowest rank, and the last loss, which is 0 where another rank has it."""
    one_step = KINDS[kind](batch)
    times = []
    for step in range(WARM_UP + steps):
        dist.barrier()
        begin = time.perf_counter()
        loss = one_step()
        if step >= WARM_UP:
            times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist(), float(loss)


def main():
    meeting, kind, batch, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    ranks.start(meeting)
    try:
        times, loss = train(kind, batch, steps)
    except Exception as error:
        ranks.emit("step", f"{kind}: {type(error).__name__}: {error}".splitlines()[0], None, "ms")
    else:
        if ranks.RANK == ranks.SIZE - 1:
            print(f"{kind}: the loss is {loss:.6f}", file=sys.stderr)
        ranks.emit("step", kind, statistics.median(times) * 1e3, "ms")
        dist.barrier()
    os._exit(0)  # gloo's threads may still be at work, after an error above all


main()
