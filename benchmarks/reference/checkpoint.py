"""checkpoint.py MEETING KIND ROUNDS LOAD SAVE: checkpoints of the MLP with Adam, by torch.distributed.checkpoint over gloo.

Kinds: fsdp2, whose state is in shards, and ddp, whose ranks have all of it. Both take the calls that the documentation of
torch.distributed.checkpoint recommends. LOAD and SAVE are folders. The ranks load the first ("-": they make a step in its place),
and save to the second ("-": they do not); the times are those of the slowest rank.
"""

import os
import statistics
import sys

import models
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def made(kind):
    model = models.mlp()
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks.SIZE,))
        for unit in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
            fully_shard(unit, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


class Run(dcp.stateful.Stateful):
    """Model and optimizer as the documentation saves them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def sums(model, optimizer):
    """Of what was trained, as all ranks have it together: equal where the same was loaded."""
    found = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found.append(whole.double().sum().item())
    return found


def work(kind, rounds, load, save):
    torch.manual_seed(0)
    model, optimizer = made(kind)
    run = {"run": Run(model, optimizer)}
    if load == "-":
        torch.manual_seed(1)
        nn.functional.cross_entropy(model(torch.randn(8, 2048)), torch.randint(2048, (8,))).backward()
        optimizer.step()
    else:
        times = [ranks.timed(lambda: dcp.load(run, checkpoint_id=load)) for _ in range(rounds + 1)][1:]
        ranks.emit("load", kind, statistics.median(times) * 1e3, "ms")
    if save != "-":
        times = [ranks.timed(lambda: dcp.save(run, checkpoint_id=save)) for _ in range(rounds + 1)][1:]
        ranks.emit("save", kind, statistics.median(times) * 1e3, "ms")
    print(f"{kind}: the sums are {sum(sums(model, optimizer)):.9g}", file=sys.stderr)


def main():
    meeting, kind, rounds, load, save = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
    ranks.start(meeting)
    work(kind, rounds, load, save)
    dist.barrier()
    os._exit(0)  # gloo's threads may still be at work


main()
