"""Giving all ranks the same start, and objects from rank to rank."""

from __future__ import annotations

import io
import pickle
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, TypeVar, Union, cast

import torch

from sirtaki.common.exceptions import InvalidArgumentError, MismatchError
from sirtaki.torch._library import _C
from sirtaki.torch.process_sets import ProcessSet, _impl_of, global_process_set

Parameters = Union[torch.nn.Module, Dict[str, Any], Iterable[Tuple[str, torch.Tensor]], Iterable[torch.Tensor]]


# ---- objects ----

# What goes first, so that a rank that has none tells its peers, who would wait for it.
_OBJECT, _FAILURE = b"\0", b"\1"


def _dumps(obj: Any) -> bytes:
    # It takes functions and classes of the program's main module besides; optional.
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    return cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)


def _packed(make: Callable[[], bytes]) -> Tuple[bytes, Optional[Exception]]:
    try:
        return _OBJECT + make(), None
    except Exception as error:
        return _FAILURE + str(error).encode("utf-8", "replace"), error


def _unpacked(data: bytes, rank: int) -> memoryview:
    if data[:1] == _FAILURE:
        raise InvalidArgumentError(f"the object of rank {rank} cannot be pickled: {data[1:].decode('utf-8')}")
    return memoryview(data)[1:]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of rank ``root_rank``, which itself gets its own back; what the others give is not looked at."""
    is_root = _C.rank() == root_rank
    data, error = _packed(lambda: _dumps(obj)) if is_root else (b"", None)
    data = _C.broadcast_bytes(data, root_rank, name or "", process_set._impl or _impl_of(process_set))
    if error is not None:
        raise error
    return obj if is_root else pickle.loads(_unpacked(data, root_rank))


def broadcast_object_fn(
    root_rank: int = 0, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """broadcast_object() with all but the object."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[Any]:
    """The objects of all ranks, in their order."""
    impl = process_set._impl or _impl_of(process_set)
    data, error = _packed(lambda: _dumps(obj))
    gathered = _C.allgather_bytes(data, name or "", impl)
    if error is not None:
        raise error
    return [pickle.loads(_unpacked(each, rank)) for each, rank in zip(gathered, impl.ranks())]


Made = TypeVar("Made")


def agreed(make: Callable[[], Made], process_set: ProcessSet = global_process_set) -> Made:
    """What ``make`` gives, which looks at this rank's arguments. If they are wrong on one rank of the set, all raise:
    the others would wait for that one. Collective."""
    made: Optional[Made] = None
    error: Union[None, TypeError, ValueError] = None
    try:
        made = make()
    except (TypeError, ValueError) as wrong:
        error = wrong
    texts: List[Optional[str]] = []
    if process_set.included() and (process_set.size() or 1) > 1:
        texts = allgather_object(None if error is None else str(error), None, process_set)
    if error is not None:
        raise error
    for rank, text in zip(process_set.ranks or [], texts):
        if text is not None:
            raise InvalidArgumentError(f"rank {rank}: {text}")
    return cast(Made, made)


# ---- parameters ----


def _named(params: Parameters) -> List[Tuple[str, torch.Tensor]]:
    if isinstance(params, torch.nn.Module):
        params = params.state_dict()
    if isinstance(params, torch.Tensor) or isinstance(params, str) or not hasattr(params, "__iter__"):
        raise ValueError(f"invalid params of type: {type(params)}")
    named: List[Tuple[str, torch.Tensor]] = []
    for number, item in enumerate(sorted(params.items()) if isinstance(params, dict) else params):
        name, tensor = item if isinstance(item, tuple) else (str(number), item)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"invalid params: {name!r} is a {type(tensor).__name__}, not a tensor")
        named.append((name, tensor))
    return named


def broadcast_parameters(
    params: Parameters, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites tensors with those of rank ``root_rank``: of a ``state_dict()``, of ``named_parameters()``, of a list
    of tensors, or of a module. Names, types and shapes are compared first: if they differ, nothing is changed."""
    impl = process_set._impl or _impl_of(process_set)
    _C.broadcast_parameters(agreed(lambda: _named(params), process_set), root_rank, impl)


def check_parameters(
    params: Parameters, process_set: ProcessSet = global_process_set
) -> None:
    """Compares tensors between the ranks, bit by bit; raises MismatchError, which names the first difference, on every
    rank if they are not the same."""
    impl = process_set._impl or _impl_of(process_set)
    _C.check_parameters(agreed(lambda: _named(params), process_set), impl)


def metric_average(
    value: Union[float, torch.Tensor],
    name: Optional[str] = None,
    *,
    weight: Optional[float] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The mean of the ranks' values, weighted if there is a weight: a number, or of a tensor a new tensor."""
    impl = process_set._impl or _impl_of(process_set)
    if weight is not None:
        return _C.weighted_metric_average(float(value), float(weight), name or "", impl)
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return _C.tensor_metric_average(value, name or "", impl)
    return _C.metric_average(float(value), name or "", impl)


# ---- optimizers ----


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
        return ("tensor", self._numbers[id(obj)], obj.dtype, tuple(obj.shape), on)


class _Unpickler(pickle.Unpickler):
    """Makes tensors to be received into."""

    def __init__(self, file: io.BytesIO, parameters: List[torch.Tensor]) -> None:
        super().__init__(file)
        self._parameters = parameters
        self._of_number: Dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "parameter":
            return self._parameters[pid[1]]
        _, number, dtype, shape, on = pid
        if number not in self._of_number:
            device = torch.device("cpu")
            if on != "cpu":
                device = next((p.device for p in self._parameters if p.device.type != "cpu"), torch.device("cuda"))
            self._of_number[number] = torch.zeros(shape, dtype=dtype, device=device)
        return self._of_number[number]

    @property
    def tensors(self) -> List[torch.Tensor]:
        return [self._of_number[number] for number in sorted(self._of_number)]


def _shape_of(optimizer: torch.optim.Optimizer) -> Any:
    kinds = [base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim")]
    groups = optimizer.param_groups
    return kinds[:1], [[(str(p.dtype), tuple(p.shape), p.device.type) for p in g["params"]] for g in groups]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Optional[torch.nn.Module] = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the optimizer state of rank ``root_rank`` (momentum, moments, step counts, LBFGS's history) and
    its options by groups, learning rates too: training goes on everywhere as it would there, bit for bit. State that
    only the root has is made on the others, state that only they have is dropped. ``model`` is not needed.

    For any optimizer whose ``state`` and ``param_groups`` are all it has; collective. Raises MismatchError on all ranks
    if their optimizers are not made up alike.
    """
    del model
    impl = process_set._impl or _impl_of(process_set)
    is_root = _C.rank() == root_rank
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    tensors: List[torch.Tensor] = []

    def packed() -> bytes:
        nonlocal tensors
        file = io.BytesIO()
        pickler = _Pickler(file, {id(parameter): place for place, parameter in enumerate(parameters)})
        options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        pickler.dump((list(optimizer.state.items()), options))
        tensors = pickler.tensors
        return file.getvalue()

    _require_same(_shape_of(optimizer), process_set)
    data, error = _packed(packed) if is_root else (b"", None)
    data = _C.broadcast_bytes(data, root_rank, "", impl)
    if error is not None:
        raise error
    if not is_root:
        unpickler = _Unpickler(io.BytesIO(_unpacked(data, root_rank)), parameters)
        state, options = unpickler.load()
        tensors = unpickler.tensors
    if tensors:
        _C.grouped_broadcast_(tensors, root_rank, "", impl)
    if is_root:
        return
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, of_root in zip(optimizer.param_groups, options):
        group.update(of_root)


def _require_same(mine: Any, process_set: ProcessSet) -> None:
    impl = process_set._impl or _impl_of(process_set)
    of_ranks = allgather_object(mine, None, process_set)
    if all(other == of_ranks[0] for other in of_ranks):
        return
    differs = next(i for i, other in enumerate(of_ranks) if other != of_ranks[0])
    ranks = impl.ranks()
    raise MismatchError(
        f"the optimizers of the ranks are not made up alike: rank {ranks[0]} has {of_ranks[0]}, rank {ranks[differs]} has "
        f"{of_ranks[differs]}"
    )
