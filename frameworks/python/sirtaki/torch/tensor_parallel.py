"""Layers that are split over the ranks of a process set: each rank has a part of the weights, and the ranks compute the
layer together.

    mesh = hvd.mesh({"data": -1, "tensor": 2})
    expand = hvd.ColumnParallelLinear(256, 1024, process_set=mesh.set("tensor"))
    contract = hvd.RowParallelLinear(1024, 256, process_set=mesh.set("tensor"))
    y = contract(F.gelu(expand(x)))  # one all-reduce forward, and one backward

The ranks of the set give their layers the same inputs and get the same outputs. Average gradients over the ranks that have
the same part: ``DistributedOptimizer(..., process_set=mesh.set("data"))``.

A layer is initialised as the unsplit one would be, to the bit, if the ranks' generators are equal. Constructors are
collective over the set, and raise on all ranks: MismatchError if arguments differ, ValueError if sizes cannot be shared;
sizes need not divide. forward() and backward() are collective. The ``load_state_dict()`` of a model takes the unsplit
model's state as well as its own; ``whole_state_dict(model)`` gives the former.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Union

import torch
from torch import nn

from sirtaki.common.exceptions import InvalidArgumentError
from sirtaki.torch._library import _C
from sirtaki.torch.functions import agreed
from sirtaki.torch.process_sets import ProcessSet, _impl_of, global_process_set

__all__ = [
    "ColumnParallelLinear", "ParallelCrossEntropy", "ParallelEmbedding", "RowParallelLinear", "fill_whole", "is_split",
    "whole_of", "whole_state_dict",
]


class _ParallelModule(nn.Module):
    """What split layers have in common. ``_split_along``: the dimension of each parameter that is split."""

    _split_along: Dict[str, int] = {}

    def _join(
        self, process_set: ProcessSet, name: Optional[str], what: str, size: int, blocks: int, unit: int, **options: Any
    ) -> None:
        def checked() -> Any:
            for argument, value in ((what, size), ("blocks", blocks), ("unit", unit)):
                if not isinstance(value, int):
                    raise InvalidArgumentError(f"{argument} is {value!r}; it must be a whole number")
            return [f"{key} {value}" for key, value in options.items()]

        texts: List[str] = agreed(checked, process_set, "sirtaki/the check of a split layer")
        self.process_set = process_set
        self._layer = _C.ParallelLayer(
            type(self).__name__, name or "", _impl_of(process_set), what, size, blocks, unit, texts
        )

    def _take(self, whole: nn.Module) -> None:
        """Takes this rank's parts of the parameters of the unsplit layer."""
        for name, parameter in whole._parameters.items():
            if parameter is None:
                self.register_parameter(name, None)
                continue
            dim = self._split_along.get(name)
            data = self._layer.common(parameter) if dim is None else self._layer.part(parameter, dim)
            self.register_parameter(name, nn.Parameter(data, parameter.requires_grad))
        self._mark()

    def _mark(self) -> None:
        for name, dim in self._split_along.items():
            parameter = getattr(self, name, None)
            if parameter is not None:
                self._layer.mark(parameter, dim)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "_ParallelModule":
        super()._apply(fn, recurse)
        self._mark()  # it may have made new parameters
        return self

    def __getstate__(self) -> Dict[str, Any]:
        # A copy is a layer of its own, which the other ranks make too.
        return {**self.__dict__, "_layer": _Copied(self._layer)}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__({**state, "_layer": state["_layer"].layer})
        self._mark()

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *rest: Any) -> None:
        wholes: Dict[str, torch.Tensor] = {}
        for name in self._split_along:
            parameter, key = getattr(self, name, None), prefix + name
            given = state_dict.get(key)
            if parameter is None or not isinstance(given, torch.Tensor) or not _C.split_set_of(parameter):
                continue
            if list(given.shape) == _C.whole_shape_of(parameter):
                wholes[key], state_dict[key] = given, _C.part_for(parameter, given)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._mark()  # with assign=True the parameters are new
        state_dict.update(wholes)

    def _save_to_state_dict(self, destination: Dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # What is told to broadcast a state_dict() over the set refuses parts as well.
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, dim in self._split_along.items():
            tensor = destination.get(prefix + name)
            if tensor is not None:
                self._layer.mark(tensor, dim)


class _Copied:
    """A layer on its way into a copy of its module."""

    def __init__(self, layer: _C.ParallelLayer) -> None:
        self.layer = layer

    def __deepcopy__(self, memo: Any) -> "_Copied":
        return _Copied(self.layer.anew())

    def __reduce__(self) -> Any:
        raise TypeError("a split layer cannot be pickled: save whole_state_dict() of the model")


class ColumnParallelLinear(_ParallelModule):
    """An nn.Linear whose output features are split: ``[..., in_features]``, the same on all ranks, becomes ``[..., this
    rank's features]``. ``gather_output``: all features on every rank, at the price of an all-gather. ``blocks``: the
    features are that many equal blocks, and each is split by itself: 3 where one matrix makes q, k and v. ``unit``: each
    rank gets a multiple of that many features of a block, the width of an attention head."""

    _split_along = {"weight": 0, "bias": 0}

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None,
        dtype: Optional[torch.dtype] = None, *, gather_output: bool = False, blocks: int = 1, unit: int = 1,
        process_set: ProcessSet = global_process_set, name: Optional[str] = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        self._join(process_set, name, "out_features", out_features, blocks, unit, in_features=in_features,
                   bias=bool(bias), gather_output=bool(gather_output), dtype=dtype)
        self._take(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._layer.column(input, self.weight, self.bias, self.gather_output)

    def extra_repr(self) -> str:
        return (f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
                f"gather_output={self.gather_output}, part {self._layer.index()} of {self._layer.ranks()}")


class RowParallelLinear(_ParallelModule):
    """An nn.Linear whose input features are split: the ranks' results are added up, and then the bias, which all ranks
    have. ``input_is_parallel``: False takes this rank's features from an input that has all of them. ``unit``: that of the
    layer before."""

    _split_along = {"weight": 1}

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None,
        dtype: Optional[torch.dtype] = None, *, input_is_parallel: bool = True, unit: int = 1,
        process_set: ProcessSet = global_process_set, name: Optional[str] = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.input_is_parallel = in_features, out_features, input_is_parallel
        self._join(process_set, name, "in_features", in_features, 1, unit, out_features=out_features, bias=bool(bias),
                   input_is_parallel=bool(input_is_parallel), dtype=dtype)
        self._take(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._layer.row(input, self.weight, self.bias, self.input_is_parallel)

    def extra_repr(self) -> str:
        return (f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
                f"input_is_parallel={self.input_is_parallel}, part {self._layer.index()} of {self._layer.ranks()}")


class ParallelEmbedding(_ParallelModule):
    """An nn.Embedding whose vocabulary is split. ``logits(x)`` is for models whose last layer has the same matrix: it
    gives this rank's part of the vocabulary, for ParallelCrossEntropy."""

    _split_along = {"weight": 0}

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: Optional[int] = None, device: Any = None,
        dtype: Optional[torch.dtype] = None, *, process_set: ProcessSet = global_process_set, name: Optional[str] = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._join(process_set, name, "num_embeddings", num_embeddings, 1, 1, embedding_dim=embedding_dim,
                   padding_idx=padding_idx, dtype=dtype)
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.padding_idx = whole.padding_idx
        self._take(whole)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._layer.embed(input, self.weight, -1 if self.padding_idx is None else self.padding_idx)

    def logits(self, input: torch.Tensor) -> torch.Tensor:
        return self._layer.column(input, self.weight, None, False)

    def extra_repr(self) -> str:
        return (f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, "
                f"part {self._layer.index()} of {self._layer.ranks()}")


_REDUCTIONS = ("none", "mean", "sum")  # as torch numbers them


class ParallelCrossEntropy(_ParallelModule):
    """An nn.CrossEntropyLoss of logits that are split over the classes: ``[..., this rank's classes]`` and targets
    ``[...]``, the same on all ranks. ``num_classes``: of all ranks together. It can be differentiated once."""

    def __init__(
        self, num_classes: int, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, *,
        process_set: ProcessSet = global_process_set, name: Optional[str] = None,
    ) -> None:
        super().__init__()
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.reduction, self.label_smoothing = reduction, float(label_smoothing)
        self._join(process_set, name, "num_classes", num_classes, 1, 1, reduction=reduction, ignore_index=ignore_index,
                   label_smoothing=label_smoothing)
        if reduction not in _REDUCTIONS:
            raise InvalidArgumentError(f"reduction is {reduction!r}; it must be 'none', 'mean' or 'sum'")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise InvalidArgumentError(f"label_smoothing is {label_smoothing}; it has to be between 0 and 1")

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self._layer.cross_entropy(logits, target, self.ignore_index, self.label_smoothing,
                                         _REDUCTIONS.index(self.reduction))

    def extra_repr(self) -> str:
        return f"{self.num_classes}, part {self._layer.index()} of {self._layer.ranks()}"


def is_split(parameter: torch.Tensor) -> bool:
    """Returns whether the tensor is this rank's part of a parameter of a split layer."""
    return _C.is_split(parameter)


def whole_of(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the whole of which the parameter is a part, in new memory, on all ranks of its layer's set. Collective there.
    A parameter that is not split is returned as it is, detached."""
    return _C.whole_of(parameter)


def fill_whole(parameter: torch.Tensor, fill: Callable[[torch.Tensor], Any]) -> None:
    """Lets ``fill`` write the whole tensor in place, and keeps this rank's part: for initialising by one's own rule, as in
    ``fill_whole(layer.weight, lambda whole: nn.init.normal_(whole, 0, 0.02))``. A parameter that is not split is written
    itself. Not collective."""
    _C.fill_whole(parameter, fill)


def whole_state_dict(module: nn.Module, device: Union[torch.device, str, None] = None) -> Dict[str, Any]:
    """Returns what ``state_dict()`` of the unsplit model would be, in copies: split parameters as wholes, on all ranks.
    Collective over the sets of the split layers. ``device``: each tensor goes there as it comes, so that a GPU has one whole
    at a time; "cpu" for a model that does not fit one GPU. None: tensors stay where they are."""
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            whole = _C.whole_of(value)
            # Tensors that are not split are copied too: the state is that of one moment.
            state[name] = whole.to(whole.device if device is None else device, copy=_C.split_set_of(value) is None)
    return state
