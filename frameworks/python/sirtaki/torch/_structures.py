"""Tensors within what a module takes and gives: tuples, lists, dictionaries and dataclasses of them, as deep as they are."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Iterator, Tuple

import torch
from torch.nn.utils.rnn import PackedSequence


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_of([getattr(value, field.name, None) for field in dataclasses.fields(value)])


def moved(value: Any, device: torch.device) -> Any:
    """The same with all tensors on the device, except those of dataclasses; what has none is left as it is."""
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return value.to(device)
    if next(tensors_of(value), None) is None:
        return value
    if isinstance(value, (list, tuple)):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        made = copy.copy(value)  # of its own kind, whose constructor may want other things
        for key, item in value.items():
            made[key] = moved(item, device)
        return made
    return value


def dense_strides(tensor: torch.Tensor) -> Tuple[int, ...]:
    """The strides of a copy: the tensor's own if it lies dense in memory."""
    return torch.empty_like(tensor, device="meta").stride()
