"""sharded.py MEETING KIND BATCH STEPS: steps of the MLP with Adam, by what torch.distributed has over gloo.

Kinds: ddp, zero, zero-overlap, fsdp2 and fsdp2-kept, each also with -fused; they have the settings that their documentation
recommends. A kind that does not run here writes its error in place of a time. Model and data are those of training.cc. The
kind `nothing` has no model: its memory is what the ranks take without one.
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
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

WARM_UP = 4
RATE = 1e-4


def ddp(fused):
    """Gradients that are views of the buckets need no second memory."""
    model = nn.parallel.DistributedDataParallel(models.mlp(), gradient_as_bucket_view=True)
    return model, torch.optim.Adam(model.parameters(), lr=RATE, fused=fused)


def zero(fused, overlap=False):
    """Parameters that are views of buckets are sent by bucket; with overlap there are no such views."""
    model = nn.parallel.DistributedDataParallel(models.mlp(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=RATE, fused=fused,
                                        parameters_as_bucket_view=not overlap, overlap_with_ddp=overlap)
    if overlap:
        model.register_comm_hook(None, ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer))
    return model, optimizer


def fsdp2(fused, kept=False):
    """Each layer is a unit of its own; `kept`: its parameters stay whole from forward to backward."""
    from torch.distributed.fsdp import fully_shard  # torch has had it since 2.6
    model, mesh = models.mlp(), init_device_mesh("cpu", (ranks.SIZE,))
    for unit in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=not kept)
    return model, torch.optim.Adam(model.parameters(), lr=RATE, fused=fused)


KINDS = {"ddp": ddp, "zero": zero, "zero-overlap": lambda fused: zero(fused, overlap=True),
         "fsdp2": fsdp2, "fsdp2-kept": lambda fused: fsdp2(fused, kept=True)}


def train(kind, batch, steps):
    """The time of each step on the slowest rank, and the last loss."""
    if kind == "nothing":
        return [0.0], 0.0
    torch.manual_seed(0)
    model, optimizer = KINDS[kind.removesuffix("-fused")](True if kind.endswith("-fused") else None)
    torch.manual_seed(1)
    inputs, targets = torch.randn(batch, 2048), torch.randint(2048, (batch,))
    times = []
    for step in range(WARM_UP + steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if step >= WARM_UP:
            times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist(), loss.item()


def main():
    meeting, kind, batch, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    ranks.start(meeting)
    try:
        times, loss = train(kind, batch, steps)
    except Exception as error:
        ranks.emit("step", f"{kind}: {type(error).__name__}: {error}".splitlines()[0], None, "ms")
    else:
        if ranks.RANK == 0:
            print(f"{kind}: the loss is {loss:.6f}", file=sys.stderr)
        ranks.emit("step", kind, statistics.median(times) * 1e3, "ms")
        dist.barrier()
    os._exit(0)  # gloo's threads may still be at work, after an error above all


main()
