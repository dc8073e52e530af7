"""The shards of an optimizer: what is in the place of its parameters during a step, and the state for it."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Optional, Tuple

import torch

from sirtaki.common.exceptions import InvalidArgumentError

_BY_ELEMENT = {
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
}
Shard = Tuple[torch.Tensor, torch.Tensor, int]  # the parameter, the shard, and its first element


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
    """Belongs to one optimizer, and to the one that it was made of. What is loaded takes the place of the dictionary of
    state, and is whole."""

    def __init__(self) -> None:
        self.cut: Any = None  # the dictionary that has the state of shards
        self.in_step = False

    def check_whole(self, optimizer: torch.optim.Optimizer, what: str) -> None:
        if is_cut(optimizer):
            raise InvalidArgumentError(
                f"a sharded optimizer cannot be {what} after its first step: this rank has the state of its shards "
                "only. Save the model alone, or train without shard"
            )

    def check_not_in_step(self, call: str) -> None:
        if self.in_step:
            raise InvalidArgumentError(
                f"{call} was called within the step of a sharded optimizer, by a hook of it perhaps, which sees this "
                "rank's shards: call it before or after step()"
            )

    @contextlib.contextmanager
    def in_place(self, optimizer: torch.optim.Optimizer, shards: Optional[List[Shard]]) -> Iterator[None]:
        """Within this context the optimizer has these in the place of its parameters."""
        if shards is None:
            yield
            return
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        mine = {parameter: (shard, begin) for parameter, shard, begin in shards}
        self.cut = optimizer.state
        for parameter in [parameter for params in whole for parameter in params]:
            _cut_state(optimizer.state, parameter, *mine.get(parameter, (None, 0)))
        for group, params in zip(groups, whole):
            group["params"] = [mine[parameter][0] for parameter in params if parameter in mine]
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False
            for group, params in zip(groups, whole):
                group["params"] = params


def _cut_state(state: Any, parameter: torch.Tensor, shard: Optional[torch.Tensor], begin: int) -> None:
    """What belongs to the whole parameter becomes what belongs to the shard; of others' shards it is let go."""
    if shard is parameter or parameter not in state:
        return
    whole = state.pop(parameter)
    if shard is not None:
        state[shard] = {key: _part(value, parameter, begin, shard.numel()) for key, value in whole.items()}


def _part(value: Any, parameter: torch.Tensor, begin: int, count: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.dim() == 0:
        return value
    if value.stride() != parameter.stride():
        value = torch.empty_strided(value.shape, parameter.stride(), dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((value.numel(),), (1,)).narrow(0, begin, count).clone()
