"""broadcast_optimizer_state() gives all ranks the state of one rank's optimizer."""

from __future__ import annotations

import io
import pickle
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from sirtaki.common.exceptions import MismatchError
from sirtaki.torch._library import _C
from sirtaki.torch._shards import is_cut, parameters_of
from sirtaki.torch._structures import dense_strides
from sirtaki.torch.functions import agreed, allgather_object, broadcast_made
from sirtaki.torch.process_sets import ProcessSet, _impl_of, global_process_set

_NAME = "sirtaki/broadcast_optimizer_state"


class _Pickler(pickle.Pickler):
    """Puts tensors aside; of parameters only says which they are."""

    def __init__(self, file: io.BytesIO, places: Dict[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = places
        self.tensors: List[torch.Tensor] = []
        self._numbers: Dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) in self._places:
            return ("parameter", self._places[id(obj)])
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        on = "cpu" if obj.device.type == "cpu" else "accelerator"
        return ("tensor", self._numbers[id(obj)], obj.dtype, tuple(obj.shape), dense_strides(obj), on)


class _Unpickler(pickle.Unpickler):
    """Makes tensors to be received into."""

    def __init__(self, file: io.BytesIO, parameters: List[torch.Tensor]) -> None:
        super().__init__(file)
        self._parameters = parameters
        self._of_number: Dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "parameter":
            return self._parameters[pid[1]]
        _, number, dtype, shape, strides, on = pid
        if number not in self._of_number:
            device = torch.device("cpu")
            if on != "cpu":
                device = next((p.device for p in self._parameters if p.device.type != "cpu"), torch.device("cuda"))
            self._of_number[number] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return self._of_number[number]

    @property
    def tensors(self) -> List[torch.Tensor]:
        return [self._of_number[number] for number in sorted(self._of_number)]


def shape_of(optimizer: torch.optim.Optimizer) -> Any:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
    kinds = [base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim")]
    groups = optimizer.param_groups
    return kinds[:1], [[(str(p.dtype), tuple(p.shape), p.device.type, *part_of(p), _C.pipeline_stage_of(p)) for p in g["params"]]
                        for g in groups]


def part_of(parameter: torch.Tensor) -> List[str]:
    """Which part of a split layer's parameter it is: the ranks' parts have states of their own."""
    split = _C.split_set_of(parameter)
    if split is None:
        return []
    return [f"part {split.ranks().index(_C.rank())} of {len(split.ranks())}"]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Optional[torch.nn.Module] = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the optimizer state of rank ``root_rank`` (momentum, moments, step counts, LBFGS's history) and
    its options by groups, learning rates too: training goes on everywhere as it would on the root, bit for bit. Of a
    sharded optimizer that has made a step only the options are given: each rank has the state of its shards. State
    that only the root has is created on the others, state that only they have is dropped. Where the root has none yet, each
    parameter gets a gradient of zeros, as from Horovod; ``model`` tells which parameters of SGD have sparse ones.

    It takes any optimizer that keeps everything in ``state`` and ``param_groups``. Collective. All ranks raise
    MismatchError if their optimizers differ in type, groups or parameters.
    """
    impl = _impl_of(process_set)
    is_root = _C.rank() == root_rank
    tensors: List[torch.Tensor] = []

    def state_and_options() -> bytes:
        nonlocal tensors
        data, tensors = pack_optimizers([optimizer])
        return data

    _require_same(agreed(lambda: shape_of(optimizer), process_set), process_set)
    data = broadcast_made(state_and_options, root_rank, _NAME, impl)
    # Where there is no memory for it, say, the others must not wait.
    received = agreed(lambda: None if is_root else unpack_optimizers(data, [optimizer]), process_set)
    made, tensors = ([None], tensors) if received is None else received
    root_has = optimizer.state if made[0] is None else made[0][0]  # None: the state of its shards
    if root_has is not None and not root_has:
        _make_gradients(optimizer, model)
    if tensors:
        _C.grouped_broadcast_(tensors, root_rank, _NAME, impl)
    if made[0] is not None:
        take_state(optimizer, made[0])


def pack_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> Tuple[bytes, List[torch.Tensor]]:
    """Their state and options without the bytes of tensors, and these tensors."""
    file = io.BytesIO()
    pickler = _Pickler(file, {id(parameter): place for place, parameter in enumerate(_parameters_of(optimizers))})
    pickler.dump([(None if is_cut(optimizer) else list(optimizer.state.items()),
                   [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
                  for optimizer in optimizers])
    return file.getvalue(), pickler.tensors


def unpack_optimizers(data: Any, optimizers: Sequence[torch.optim.Optimizer]) -> Tuple[List[Any], List[torch.Tensor]]:
    """What take_state() takes when the tensors, which it returns as well, have been received."""
    unpickler = _Unpickler(io.BytesIO(data), _parameters_of(optimizers))
    made = [_made(state_and_options, optimizer) for state_and_options, optimizer in zip(unpickler.load(), optimizers)]
    return made, unpickler.tensors


def _parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> List[torch.Tensor]:
    return [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]


def take_state(optimizer: torch.optim.Optimizer, made: Any) -> None:
    state, options = made
    if state is not None:  # else each rank has the state of its shards
        if is_cut(optimizer):
            optimizer._sirtaki_shards.cut = None  # type: ignore[attr-defined]
        optimizer.state.clear()
        optimizer.state.update(state)
    for group, of_root in zip(optimizer.param_groups, options):
        group.update(of_root)


def _made(state_and_options: Any, optimizer: torch.optim.Optimizer) -> Any:
    if state_and_options[0] is None and not is_cut(optimizer):
        raise MismatchError(
            "the root has the state of its shards only, as it is after a step, and another rank has state of whole "
            "parameters: load it on all ranks, or on the root"
        )
    return state_and_options


def _make_gradients(optimizer: torch.optim.Optimizer, model: Optional[torch.nn.Module]) -> None:
    """Before its first step each parameter gets a gradient of zeros, as from Horovod, where scripts find one: a sparse one
    for SparseAdam, which takes no others, and for SGD's parameters of sparse embeddings."""
    sparse = set()
    if isinstance(optimizer, torch.optim.SGD) and model is not None:
        tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding) and module.sparse]
        sparse = {id(parameter) for table in tables for parameter in table.parameters()}
    all_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                zeros = torch.zeros_like(parameter)
                is_sparse = all_sparse or id(parameter) in sparse
                parameter.grad = zeros.to_sparse(1) if is_sparse else zeros  # by rows, as an embedding has them


def _require_same(mine: Any, process_set: ProcessSet) -> None:
    impl = _impl_of(process_set)
    of_ranks = allgather_object(mine, _NAME, process_set)
    if all(other == of_ranks[0] for other in of_ranks):
        return
    differs = next(i for i, other in enumerate(of_ranks) if other != of_ranks[0])
    ranks = impl.ranks()
    raise MismatchError(
        f"the ranks' optimizers differ in their make-up: rank {ranks[0]} has {of_ranks[0]}, rank {ranks[differs]} has "
        f"{of_ranks[differs]}"
    )
