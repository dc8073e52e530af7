"""How gradients go through collectives: Horovod's way, where the library has another."""

from __future__ import annotations

from typing import Any, Tuple

import torch

from sirtaki.torch.process_sets import ProcessSet, _impl_of


class GradientTimes(torch.autograd.Function):
    """The tensor, and its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def mean_in_backward(tensor: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Gradients through all-gather and broadcast are Horovod's: of the mean of what the ranks' losses are; the library's
    are of their sum."""
    if not (getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()):
        return tensor
    return GradientTimes.apply(tensor, 1.0 / _impl_of(process_set).size())


def size_in_backward(tensor: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Gradients through reduce-scatter are Horovod's: the library's times the ranks."""
    if not (getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()):
        return tensor
    return GradientTimes.apply(tensor, float(_impl_of(process_set).size()))
