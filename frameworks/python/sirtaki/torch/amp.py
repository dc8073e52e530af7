"""Loss scaling for training in float16."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from sirtaki.torch.optimizer import _DistributedOptimizer
from sirtaki.torch.reductions import Max, allreduce_


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, which here also waits for the averaged gradients of a DistributedOptimizer, so that a program
    only calls ``unscale_`` and ``step``; both are collective then. torch's own GradScaler works with Horovod's recipe:
    synchronize(), unscale_(), and step() within skip_synchronize()."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, _DistributedOptimizer):
            optimizer._sirtaki_synchronize()
        super().unscale_(optimizer)
        if not self._enabled or not isinstance(optimizer, _DistributedOptimizer):
            return
        if optimizer._sirtaki_reducer.has_local_gradients():
            # Those of other ranks are others: a step is made by all of them, or by none.
            for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                allreduce_(found, op=Max, process_set=optimizer._sirtaki_settings.process_set)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, _DistributedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        optimizer._sirtaki_synchronize()
        if self._enabled and optimizer._sirtaki_reducer.has_local_gradients():
            # A fused optimizer would look for what is not finite itself, among the gradients of this rank.
            if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                self.unscale_(optimizer)
        optimizer._sirtaki_stepped = False
        result = super().step(optimizer, *args, **kwargs)
        if not optimizer._sirtaki_stepped:
            optimizer.skip_step()
        return result
