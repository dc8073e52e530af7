"""These functions give all ranks the same parameters, send objects from rank to rank, and average metrics. All are
collective."""

from __future__ import annotations

import pickle
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, TypeVar, Union, cast

import torch

from sirtaki.common.exceptions import InvalidArgumentError
from sirtaki.torch._library import _C
from sirtaki.torch.process_sets import ProcessSet, _impl_of, global_process_set

__all__ = [
    "allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_parameters", "check_parameters",
    "metric_average",
]

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


def packed(make: Callable[[], bytes]) -> Tuple[bytes, Optional[Exception]]:
    try:
        return _OBJECT + make(), None
    except Exception as error:
        return _FAILURE + f"the object of rank {_C.rank()} cannot be pickled: {error}".encode("utf-8", "replace"), error


def unpacked(data: bytes) -> memoryview:
    if data[:1] == _FAILURE:
        raise InvalidArgumentError(data[1:].decode("utf-8"))
    return memoryview(data)[1:]


def broadcast_made(make: Callable[[], bytes], root_rank: int, name: str, impl: Any) -> memoryview:
    """Returns what ``make`` gives on the root. All ranks raise if it raises there. Collective."""
    data, error = packed(make) if _C.rank() == root_rank else (b"", None)
    data = _C.broadcast_bytes(data, root_rank, name, impl)
    if error is not None:
        raise error
    return unpacked(data)


def allgather_pickled(make: Callable[[], bytes], name: str, impl: Any) -> List[Any]:
    """Returns the objects that ``make`` pickles on each rank. All ranks raise if it raises on one. Collective."""
    data, error = packed(make)
    gathered = _C.allgather_bytes(data, name, impl)
    if error is not None:
        raise error
    return [pickle.loads(unpacked(each)) for each in gathered]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the object of rank ``root_rank``; the root gets its own back, and those of the others are not used.
    Collective. All ranks raise if the object cannot be pickled."""
    data = broadcast_made(lambda: _dumps(obj), root_rank, name or "", _impl_of(process_set))
    return obj if _C.rank() == root_rank else pickle.loads(data)


def broadcast_object_fn(
    root_rank: int = 0, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Returns a function that takes the object and calls broadcast_object() with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[Any]:
    """Returns the objects of all ranks, in their order. Collective. All ranks raise if an object cannot be pickled."""
    return allgather_pickled(lambda: _dumps(obj), name or "", _impl_of(process_set))


Made = TypeVar("Made")


def agreed(
    make: Callable[[], Made], process_set: ProcessSet = global_process_set, name: str = "sirtaki/the check of the arguments"
) -> Made:
    """What ``make`` gives, which looks at this rank's arguments. If they are wrong on one rank of the set, all raise:
    the others would wait for that one. Collective."""
    made: Optional[Made] = None
    error: Optional[Exception] = None
    try:
        made = make()
        _impl_of(process_set)
    except Exception as wrong:
        error = wrong
    if not isinstance(process_set, ProcessSet):
        process_set = global_process_set  # who is likely to wait
    texts: List[Tuple[int, Optional[str]]] = []  # of the ranks that have not joined
    if process_set.included() and (process_set.size() or 1) > 1:
        text = None if error is None else str(error) or type(error).__name__
        wrong_here = torch.tensor([0 if text is None else 1], dtype=torch.uint8, device="cpu")
        if _C.allgather(wrong_here, name, _impl_of(process_set)).any():
            texts = allgather_object((_C.rank(), text), name + ": what is wrong", process_set)
    if error is not None:
        raise error
    for rank, text in texts:
        if text is not None:
            told = InvalidArgumentError(f"rank {rank}: {text}")
            told.rank = rank
            raise told
    return cast(Made, made)


# ---- parameters ----


def check_initialized(named: Iterable[Tuple[str, Any]]) -> None:
    """Raises ValueError where a parameter of a lazy module has no values yet: each rank would draw its own later."""
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name!r} of a lazy module is not initialized: call the module with a batch first, as DDP needs it too"
            )


def _named(params: Parameters) -> List[Tuple[str, torch.Tensor]]:
    if isinstance(params, torch.nn.Module):
        of_module = [*params.named_parameters(), *((f"buffer {name}", buffer) for name, buffer in params.named_buffers())]
        check_initialized(of_module)
        return of_module
    if isinstance(params, torch.Tensor) or isinstance(params, str) or not hasattr(params, "__iter__"):
        raise ValueError(f"invalid params of type: {type(params)}")
    named: List[Tuple[str, torch.Tensor]] = []
    for number, item in enumerate(sorted(params.items()) if isinstance(params, dict) else params):
        name, tensor = item if isinstance(item, tuple) else (str(number), item)
        if tensor is None:  # the ranks' names are compared: it is none on all of them
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"invalid params: {name!r} is a {type(tensor).__name__}, not a tensor")
        named.append((name, tensor))
    check_initialized(named)
    return named


def broadcast_parameters(
    params: Parameters, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites tensors with those of rank ``root_rank``: of a ``state_dict()``, of ``named_parameters()``, of a list
    of tensors, or of a module; None in their place stays None. Collective. Names, types and shapes are compared first:
    if they differ, all ranks raise MismatchError and nothing is changed."""
    impl = _impl_of(process_set)
    _C.broadcast_parameters(agreed(lambda: _named(params), process_set), root_rank, impl)


def check_parameters(
    params: Parameters, process_set: ProcessSet = global_process_set
) -> None:
    """Compares tensors between the ranks, bit by bit. Collective. If they are not the same, every rank raises
    MismatchError, which names the first difference."""
    impl = _impl_of(process_set)
    _C.check_parameters(agreed(lambda: _named(params), process_set), impl)


def metric_average(
    value: Union[float, torch.Tensor],
    name: Optional[str] = None,
    *,
    weight: Optional[float] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the mean of the ranks' values, weighted if there is a weight: a number, or for a tensor a new tensor.
    Collective."""
    impl = _impl_of(process_set)
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.dim() > 0:
            if weight is not None:
                raise InvalidArgumentError("metric_average: a weight needs a single number, not a tensor of several")
            return _C.tensor_metric_average(value, name or "", impl)
    if weight is not None:
        return _C.weighted_metric_average(float(value), float(weight), name or "", impl)
    return _C.metric_average(float(value), name or "", impl)


def __getattr__(name: str) -> Any:
    # Horovod has it here. Late: it is made of what is here.
    if name == "broadcast_optimizer_state":
        from sirtaki.torch.optimizer_state import broadcast_optimizer_state

        return broadcast_optimizer_state
    raise AttributeError(f"module 'sirtaki.torch.functions' has no attribute {name!r}")
