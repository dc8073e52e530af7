"""These functions look inside a run: timelines, metrics, marks, memory. docs/observability.md and docs/memory.md say
more. None is collective."""

from __future__ import annotations

from typing import Any, Dict

import torch

from sirtaki.torch._library import _C

__all__ = ["mark", "memory_plan", "memory_use", "metrics", "release_memory", "start_timeline", "stop_timeline"]


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to write what this rank does to ``file_path``: a file ending in .json, which rank 0 alone writes, or a
    folder with one file for each rank. ``mark_cycles`` has no effect: there are no cycles."""
    del mark_cycles
    _C.start_timeline(file_path)


def stop_timeline() -> None:
    """Ends the timeline: everything up to now is in the file when this returns."""
    _C.stop_timeline()


def metrics() -> Dict[str, Any]:
    """Returns what this rank has done since init(), in numbers; see docs/observability.md. "last_step" has the same
    numbers for the last step alone. Times are in seconds."""
    return _C.metrics()


def mark(text: str) -> None:
    """Marks a moment of the program's own, in the timeline and the flight record."""
    _C.mark(text)


def memory_plan(optimizer: torch.optim.Optimizer) -> str:
    """Returns a table of what the parameters, gradients and state of an optimizer take on this host, in MiB, with each kind
    of shards, beside activations, buckets under way and the processes themselves. Not collective. State is that of
    torch.optim's Adam and its kin, Adagrad, Adadelta, RMSprop, ASGD, Rprop and SGD with their options; of another optimizer
    what this rank has of it now."""
    parameters: Dict[torch.Tensor, int] = {}  # and how many tensors of its size the state has; -1: unknown
    for group in optimizer.param_groups:
        parameters.update(dict.fromkeys(group["params"], _tensors_of_state(optimizer, group)))
    bytes_of = {parameter: parameter.numel() * parameter.element_size() for parameter in parameters}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if -1 in parameters.values():
        held = (value for state in optimizer.state.values() for value in state.values())
        state = sum(value.numel() * value.element_size() for value in held if isinstance(value, torch.Tensor))
    else:
        state = sum(parameters[parameter] * bytes_of[parameter] for parameter in trained)
    here = _C.local_size()
    hosts = -(-_C.size() // here)  # others may have another number of ranks: as if all were like this one
    once = here > 1 and all(parameter.device.type == "cpu" for parameter in parameters)
    return _C.memory_plan(
        sum(bytes_of.values()), sum(bytes_of[parameter] for parameter in trained), state, hosts * here, here, once)


def _tensors_of_state(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> int:
    for kind, tensors in (
        (torch.optim.Adam, 2 + bool(group.get("amsgrad"))),  # AdamW is one
        ((torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta, torch.optim.Rprop), 2),
        (torch.optim.RMSprop, 1 + bool(group.get("centered")) + (group.get("momentum", 0) > 0)),
        ((torch.optim.Adagrad, torch.optim.ASGD), 1),
        (torch.optim.SGD, int(group.get("momentum", 0) != 0)),
    ):
        if isinstance(optimizer, kind):
            return int(tensors)
    return -1


def memory_use() -> Dict[str, int]:
    """Returns the use of the memory for torch's large CPU tensors, in bytes; see docs/memory.md."""
    return _C.memory_use()


def release_memory() -> None:
    """Gives what that memory keeps back to the system."""
    _C.release_memory()
