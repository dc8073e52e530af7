"""Loss scaling for training in float16."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Dict, Iterator, List, Optional

import torch
from torch.amp.grad_scaler import OptState

from sirtaki.common.exceptions import MismatchError
from sirtaki.torch._library import _C
from sirtaki.torch._shards import parameters_of
from sirtaki.torch.optimizer import _DistributedOptimizer
from sirtaki.torch.process_sets import ProcessSet, _existing
from sirtaki.torch.reductions import Max, allreduce_


def _has_own_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this rank has other gradients than the others: before op Adasum, its shards of them, its own of another kind of
    optimizer, or those of other layers."""
    if not isinstance(optimizer, _DistributedOptimizer) or _sets_of_parts(optimizer) or _rows(optimizer):
        return True
    reducer = optimizer._sirtaki_reducer
    return reducer.has_local_gradients() or reducer.gradient_shards() is not None


def _sets_of_parts(optimizer: torch.optim.Optimizer) -> List[ProcessSet]:
    """The sets over which parameters of the optimizer are split."""
    sets = map(_C.split_set_of, parameters_of(optimizer))
    return list(dict.fromkeys(_existing(one) for one in sets if one is not None))


def _rows(optimizer: torch.optim.Optimizer) -> List[ProcessSet]:
    """The ranks that have the other stages of the pipeline that the optimizer's parameters belong to, if they do."""
    if not _C.is_initialized():
        return []
    return [_existing(row) for row in _C.pipeline_rows_of(parameters_of(optimizer))]


@contextlib.contextmanager
def _shards_in_groups(optimizer: Any) -> Iterator[None]:
    """Within this context the groups have what this rank keeps of gradients, if that is shards. Of each device there is
    something, on all ranks: they look for what is not finite together."""
    shards = optimizer._sirtaki_reducer.gradient_shards() if isinstance(optimizer, _DistributedOptimizer) else None
    if shards is None:
        yield
        return
    groups = optimizer.param_groups
    devices = dict.fromkeys(parameter.device for group in groups for parameter in group["params"])
    holders = []
    for gradient in [torch.zeros(1, device=device) for device in devices] + shards:
        holder = gradient.detach()
        holder.grad = gradient
        holders.append(holder)
    optimizer.param_groups = [{"params": holders}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _compare(found_inf: torch.Tensor, scale: torch.Tensor, sets: List[ProcessSet]) -> torch.Tensor:
    """Returns the greatest ``found_inf`` of the ranks of each set; all of them raise MismatchError if their scales differ."""
    flag = torch.stack([one.detach().float().cpu().reshape(()) for one in (found_inf, scale, -scale)])
    for process_set in sets:
        allreduce_(flag, op=Max, process_set=process_set)
    _, most, least = flag.tolist()
    if most != -least:
        raise MismatchError(
            f"GradScaler: the ranks have different scales, from {-least} to {most}, and so have the gradients: "
            "call load_state_dict(broadcast_object(scaler.state_dict(), root_rank=0)), which gives all the same, and zero_grad(), "
            "and backward() anew; optimizers of different process sets take a scaler each, or one with the process_set of all "
            "of them")
    return flag[0]


_STEPS_COMPARED = 16  # of those of fused optimizers one in so many
_scalers: "weakref.WeakSet[GradScaler]" = weakref.WeakSet()


def forget_unscaled(*scalers: torch.amp.GradScaler) -> None:
    """What these have unscaled, or else all of ours, belongs to a step that is not made."""
    for scaler in scalers or list(_scalers):
        if scaler.is_enabled():
            scaler._per_optimizer_states.clear()


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, which here also waits for the averaged gradients of a DistributedOptimizer, so that a program
    only calls ``unscale_`` and ``step``; both are collective then, and raise MismatchError if the ranks have different scales.
    ``process_set``: the ranks that skip steps together; default: those of the DistributedOptimizer, and nobody with another
    optimizer. torch's own GradScaler works with Horovod's recipe: synchronize(), unscale_(), and step() within
    skip_synchronize(). The stages of a Pipeline make a step together, or none does; with torch's own GradScaler their scales
    would drift apart."""

    def __init__(self, *args: Any, process_set: Optional[ProcessSet] = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._process_set = process_set
        self._fused_steps = 0
        _scalers.add(self)

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        forget_unscaled(self)  # it was unscaled by another scale

    def _sets_of(self, optimizer: torch.optim.Optimizer) -> List[ProcessSet]:
        if not self._enabled:
            return []
        process_set = self._process_set
        if process_set is None and isinstance(optimizer, _DistributedOptimizer):
            process_set = optimizer._sirtaki_settings.process_set
        sets = [process_set] if process_set is not None and process_set.included() else []
        return sets + _sets_of_parts(optimizer) + _rows(optimizer)

    def _make_scale(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        if self._scale is None:  # this rank has no loss: a stage that is not the last, a batch left out
            device = next((parameter.device for parameter in parameters_of(optimizer)), torch.device("cpu"))
            self._lazy_init_scale_growth_tracker(device)
        return self._scale

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, _DistributedOptimizer):
            optimizer._sirtaki_synchronize()
        sets = self._sets_of(optimizer)
        if sets:
            self._make_scale(optimizer)
        with _shards_in_groups(optimizer):
            super().unscale_(optimizer)
        if not sets:
            return
        found_inf = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found_inf:  # this rank has no gradients
            found_inf[torch.device("cpu")] = torch.zeros((), device="cpu")
        # They may be on other devices, and on other numbers of them.
        found = torch.stack([one.cpu() for one in found_inf.values()]).amax()
        try:
            flag = _compare(found, self._scale, sets)
        except Exception:
            del self._per_optimizer_states[id(optimizer)]  # no step is made with these gradients
            raise
        for one in found_inf.values():
            one.copy_(flag)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, _DistributedOptimizer):
            optimizer._sirtaki_synchronize()
        sets = self._sets_of(optimizer)
        if sets and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            # A fused optimizer looks itself for what is not finite, among the gradients of this rank.
            if getattr(optimizer, "_step_supports_amp_scaling", False) and not _has_own_gradients(optimizer):
                # It waits for no GPU, which the comparison does.
                if self._fused_steps % _STEPS_COMPARED == 0:
                    _compare(torch.zeros(()), self._make_scale(optimizer), sets)
                self._fused_steps += 1
            else:
                self.unscale_(optimizer)
        if not isinstance(optimizer, _DistributedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        optimizer._sirtaki_stepped = False
        result = super().step(optimizer, *args, **kwargs)
        if not optimizer._sirtaki_stepped:
            optimizer.skip_step()
        return result
