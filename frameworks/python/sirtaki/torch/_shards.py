"""The shards of an optimizer: what is in the place of its parameters during a step, and the state for it."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Optional

import torch

from sirtaki.common.exceptions import InvalidArgumentError

_BY_ELEMENT = {
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
}


def by_element(optimizer: torch.optim.Optimizer, shard: Optional[str]) -> bool:
    """Whether the optimizer may get a part of each parameter. One of the program's own gets whole ones."""
    if shard is not None and isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS looks at all parameters at once, so its state cannot be sharded: leave out shard")
    return type(optimizer) in _BY_ELEMENT


def is_cut(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this rank has the optimizer's state for its shards only."""
    shards = getattr(optimizer, "_sirtaki_shards", None)
    return shards is not None and shards.cut is optimizer.state


class Shards:
    """Belongs to one optimizer. What is loaded takes the place of its dictionary of state, and is whole."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.cut: Any = None  # the dictionary that has the state of shards

    def check_whole(self, what: str) -> None:
        if self.cut is not None and is_cut(self._optimizer):
            raise InvalidArgumentError(
                f"a sharded optimizer cannot be {what} after its first step: this rank has the state of its shards "
                "only. Save the model alone, or train without shard"
            )

    @contextlib.contextmanager
    def in_place(self, shards: Optional[List[List[torch.Tensor]]]) -> Iterator[None]:
        """Within this context the optimizer has these in the place of each group's parameters."""
        if shards is None:
            yield
            return
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        _cut_state(self._optimizer.state, [p for params in whole for p in params], [s for mine in shards for s in mine])
        self.cut = self._optimizer.state
        for group, mine in zip(groups, shards):
            group["params"] = mine
        try:
            yield
        finally:
            for group, params in zip(groups, whole):
                group["params"] = params


def _cut_state(state: Any, parameters: List[torch.Tensor], shards: List[torch.Tensor]) -> None:
    """What belongs to whole parameters becomes what belongs to shards; of others' shards it is let go."""
    mine = set(shards)
    for parameter in parameters:
        if parameter in mine or parameter not in state:
            continue
        whole = state.pop(parameter)
        for shard in shards:
            start = shard.storage_offset() - parameter.storage_offset()
            same_memory = shard.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
            if same_memory and 0 <= start < parameter.numel():
                state[shard] = {key: _part(value, parameter, start, shard.numel()) for key, value in whole.items()}


def _part(value: Any, parameter: torch.Tensor, start: int, count: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.dim() == 0:
        return value
    if value.stride() != parameter.stride():
        value = torch.empty_strided(value.shape, parameter.stride(), dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((value.numel(),), (1,)).narrow(0, start, count).clone()
