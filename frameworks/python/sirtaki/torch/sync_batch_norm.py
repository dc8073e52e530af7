"""SyncBatchNorm normalizes over the joined batch of all ranks."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from sirtaki.torch._library import _C
from sirtaki.torch.process_sets import ProcessSet, _impl_of, global_process_set


class SyncBatchNorm(_BatchNorm):
    """SyncBatchNorm takes the place of BatchNorm1d, 2d and 3d, and has their arguments, parameters and buffers. In
    training, mean and variance are those of the batches of all ranks together, and so is the gradient of the input;
    batches may differ in size, and may be empty on some ranks. forward() is collective then, and backward() too if the
    input requires a gradient. In evaluation it is plain batch normalization. It works on the CPU and on GPUs."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: Optional[float] = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set
        self._training: Optional[_C.BatchNormTraining] = None
        self._training_of: Optional[_C.ProcessSet] = None

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        impl = _impl_of(self.process_set)
        if self._training is None or self._training_of is not impl:  # of a session before
            self._training, self._training_of = _C.BatchNormTraining(self.num_features, impl), impl
        return self._training.forward(
            input,
            self.weight,
            self.bias,
            *((self.running_mean, self.running_var, self.num_batches_tracked) if self.track_running_stats else (None,) * 3),
            self.eps,
            self.momentum,
        )

    def __getstate__(self) -> dict:
        # A copy is a module of its own, which the other ranks have too.
        return {**self.__dict__, "_training": None, "_training_of": None}

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Returns the module with each BatchNorm1d, 2d and 3d in it replaced by a SyncBatchNorm that has the same
        parameters and buffers. Not collective, but every rank has to do it."""
        return cls._convert(module, process_set, {})

    @classmethod
    def _convert(
        cls, module: torch.nn.Module, process_set: ProcessSet, made: Dict[torch.nn.Module, torch.nn.Module]
    ) -> torch.nn.Module:
        """``made``: a module may stand in several places, and is one afterwards too."""
        if module in made:
            return made[module]
        converted = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set=process_set,
            )
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                setattr(converted, name, getattr(module, name))
            converted.training = module.training
        made[module] = converted
        for name, child in module._modules.items():
            if child is not None:
                converted._modules[name] = cls._convert(child, process_set, made)
        return converted
