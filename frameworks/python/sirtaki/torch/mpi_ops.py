"""The collectives, with Horovod's names, arguments and defaults.

Every rank of the process set calls the same operation, under the same name, with tensors of the same type and shape;
where these differ MismatchError (a HorovodInternalError and a ValueError) is raised on all of them. Calls without a name
are matched by their order. The functions ``f(t)`` return a new tensor and are differentiable; ``f_(t)`` overwrite theirs;
the ``_async`` forms return a Handle at once, for synchronize() and poll().
"""

from __future__ import annotations

import enum
import warnings
from typing import Any, List, Optional, Sequence, Tuple, Type, Union

import torch

from sirtaki.common.exceptions import HorovodInternalError
from sirtaki.torch._library import _C
from sirtaki.torch.compression import Compression, Compressor, _number_of
from sirtaki.torch.process_sets import (
    ProcessSet,
    _impl_of,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from sirtaki.torch.session import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    xla_built,
)

Handle = _C.Handle


class ReduceOp(enum.IntEnum):
    """How a reduction combines. The numbers are those of reduce_op.h, and Horovod's as far as it has them."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5
    BitAnd = 6
    BitOr = 7
    BitXor = 8


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
BitAnd = ReduceOp.BitAnd
BitOr = ReduceOp.BitOr
BitXor = ReduceOp.BitXor

Tensors = Sequence[torch.Tensor]
AlltoallResult = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
_Compression = Type[Compressor]


def _op(op: Optional[int], average: Optional[bool]) -> int:
    """``average`` is what Horovod had before ``op``."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


class _GradientTimes(torch.autograd.Function):
    """The tensor, and its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def _mean_in_backward(tensor: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Gradients through all-gather and broadcast are Horovod's: of the mean of what the ranks' losses are; the library's
    are of their sum."""
    if not (getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()):
        return tensor
    return _GradientTimes.apply(tensor, 1.0 / _impl_of(process_set).size())


def _size_in_backward(tensor: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Gradients through reduce-scatter are Horovod's: the library's times the ranks."""
    if not (getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()):
        return tensor
    return _GradientTimes.apply(tensor, float(_impl_of(process_set).size()))


# ---- all-reduce ----


def allreduce(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: _Compression = Compression.none,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The average, sum, … over the ranks, element by element: a new tensor, the same bits on every rank. A sparse
    tensor's result is sparse."""
    op = _op(op, average)
    built_in = _number_of(compression)
    travelling, ctx = (tensor, None) if built_in is not None else compression.compress(tensor)
    result = _C.allreduce(
        travelling,
        op,
        name or "",
        prescale_factor,
        postscale_factor,
        process_set._impl or _impl_of(process_set),
        built_in or 0,
        False,
    )
    return result if built_in is not None else compression.decompress(result, ctx)


def allreduce_async(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    return _C.allreduce_async(
        tensor,
        _op(op, average),
        name or "",
        prescale_factor,
        postscale_factor,
        process_set._impl or _impl_of(process_set),
        0,
        False,
    )


def allreduce_(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    return _C.allreduce_(
        tensor,
        _op(op, average),
        name or "",
        prescale_factor,
        postscale_factor,
        process_set._impl or _impl_of(process_set),
        0,
        False,
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    return _C.allreduce_async_(
        tensor,
        _op(op, average),
        name or "",
        prescale_factor,
        postscale_factor,
        process_set._impl or _impl_of(process_set),
        0,
        False,
    )


def grouped_allreduce(
    tensors: Tensors,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: _Compression = Compression.none,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> List[torch.Tensor]:
    """Of several tensors as one operation: none of them starts before all are there on every rank."""
    op = _op(op, average)
    built_in = _number_of(compression)
    if built_in is not None:
        pairs = [(tensor, None) for tensor in tensors]
    else:
        pairs = [compression.compress(tensor) for tensor in tensors]
    results = _C.grouped_allreduce(
        [tensor for tensor, _ in pairs],
        op,
        name or "",
        prescale_factor,
        postscale_factor,
        process_set._impl or _impl_of(process_set),
        built_in or 0,
        False,
    )
    if built_in is not None:
        return results
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]


def grouped_allreduce_async(
    tensors: Tensors,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    return _C.grouped_allreduce_async(
        list(tensors),
        _op(op, average),
        name or "",
        prescale_factor,
        postscale_factor,
        process_set._impl or _impl_of(process_set),
        0,
        False,
    )


def grouped_allreduce_(
    tensors: Tensors,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> List[torch.Tensor]:
    return _C.grouped_allreduce_(
        list(tensors),
        _op(op, average),
        name or "",
        prescale_factor,
        postscale_factor,
        process_set._impl or _impl_of(process_set),
        0,
        False,
    )


def grouped_allreduce_async_(
    tensors: Tensors,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    return _C.grouped_allreduce_async_(
        list(tensors),
        _op(op, average),
        name or "",
        prescale_factor,
        postscale_factor,
        process_set._impl or _impl_of(process_set),
        0,
        False,
    )


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    op: Optional[int] = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """The sum or average of sparse COO tensors. ``handle()`` and ``synchronize(handle)`` give the result, coalesced."""
    return _C.sparse_allreduce_async(
        tensor, _op(op, None), name or "", 1.0, 1.0, process_set._impl or _impl_of(process_set), 0, False
    )


# ---- reduce-scatter ----


def reducescatter(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    compression: _Compression = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """As allreduce, of which each rank gets its rows along the first dimension: as many for each, one more for the
    first ones where they do not divide."""
    travelling, ctx = compression.compress(_size_in_backward(tensor, process_set))
    result = _C.reducescatter(
        travelling, op, name or "", prescale_factor, postscale_factor, process_set._impl or _impl_of(process_set)
    )
    return compression.decompress(result, ctx)


def reducescatter_async(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    return _C.reducescatter_async(
        tensor, op, name or "", prescale_factor, postscale_factor, process_set._impl or _impl_of(process_set)
    )


def grouped_reducescatter(
    tensors: Tensors,
    name: Optional[str] = None,
    compression: _Compression = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> List[torch.Tensor]:
    pairs = [compression.compress(_size_in_backward(tensor, process_set)) for tensor in tensors]
    results = _C.grouped_reducescatter(
        [tensor for tensor, _ in pairs],
        op,
        name or "",
        prescale_factor,
        postscale_factor,
        process_set._impl or _impl_of(process_set),
    )
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: Optional[str] = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    return _C.grouped_reducescatter_async(
        list(tensors), op, name or "", prescale_factor, postscale_factor, process_set._impl or _impl_of(process_set)
    )


# ---- moving rows ----


def allgather(
    tensor: torch.Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, one after the other along the first dimension, in which they may differ."""
    return _C.allgather(
        _mean_in_backward(tensor, process_set), name or "", process_set._impl or _impl_of(process_set)
    )


def allgather_async(
    tensor: torch.Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.allgather_async(tensor, name or "", process_set._impl or _impl_of(process_set))


def grouped_allgather(
    tensors: Tensors, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[torch.Tensor]:
    return _C.grouped_allgather(
        [_mean_in_backward(tensor, process_set) for tensor in tensors],
        name or "",
        process_set._impl or _impl_of(process_set),
    )


def grouped_allgather_async(
    tensors: Tensors, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.grouped_allgather_async(list(tensors), name or "", process_set._impl or _impl_of(process_set))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of rank ``root_rank`` of the job. The others give one of the same type and shape."""
    return _C.broadcast(
        _mean_in_backward(tensor, process_set), root_rank, name or "", process_set._impl or _impl_of(process_set)
    )


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.broadcast_async(tensor, root_rank, name or "", process_set._impl or _impl_of(process_set))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    return _C.broadcast_(tensor, root_rank, name or "", process_set._impl or _impl_of(process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.broadcast_async_(tensor, root_rank, name or "", process_set._impl or _impl_of(process_set))


def grouped_broadcast(
    tensors: Tensors, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[torch.Tensor]:
    return _C.grouped_broadcast(
        [_mean_in_backward(tensor, process_set) for tensor in tensors],
        root_rank,
        name or "",
        process_set._impl or _impl_of(process_set),
    )


def grouped_broadcast_async(
    tensors: Tensors, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.grouped_broadcast_async(list(tensors), root_rank, name or "", process_set._impl or _impl_of(process_set))


def grouped_broadcast_(
    tensors: Tensors, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[torch.Tensor]:
    return _C.grouped_broadcast_(list(tensors), root_rank, name or "", process_set._impl or _impl_of(process_set))


def grouped_broadcast_async_(
    tensors: Tensors, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.grouped_broadcast_async_(list(tensors), root_rank, name or "", process_set._impl or _impl_of(process_set))


def _split_list(splits: Union[None, torch.Tensor, Sequence[int]]) -> List[int]:
    if splits is None:
        return []
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.dtype.is_floating_point or splits.dtype.is_complex:
            raise ValueError(f"splits is a {splits.dtype} tensor of {splits.dim()} dimensions; 1 of integers is meant")
        return splits.tolist()
    return [int(rows) for rows in splits]


def alltoall(
    tensor: torch.Tensor,
    splits: Union[None, torch.Tensor, Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> AlltoallResult:
    """Each rank deals out its rows to all, ``splits[i]`` of them to the i-th of the set (equally without ``splits``),
    and gets those for it. With ``splits`` it returns the tensor and how many of its rows came from each rank."""
    result, received = _C.alltoall(tensor, _split_list(splits), name or "", process_set._impl or _impl_of(process_set))
    return result if splits is None else (result, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Union[None, torch.Tensor, Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As alltoall(); what synchronize() gives is a pair, without ``splits`` too, as in Horovod."""
    return _C.alltoall_async(tensor, _split_list(splits), name or "", process_set._impl or _impl_of(process_set), True)


# ---- between two ranks ----


def send(tensor: torch.Tensor, to: int, tag: int = 0) -> None:
    """Sends the tensor to rank ``to`` of the job; returns when it may be written again."""
    _C.send(tensor, to, tag)


def isend(tensor: torch.Tensor, to: int, tag: int = 0) -> Handle:
    return _C.isend(tensor, to, tag)


def recv_(tensor: torch.Tensor, source: int, tag: int = 0) -> torch.Tensor:
    """Overwrites the tensor with the next message of rank ``source`` with this tag."""
    return _C.recv_(tensor, source, tag)


def irecv(tensor: torch.Tensor, source: int, tag: int = 0) -> Handle:
    return _C.irecv(tensor, source, tag)


# ---- waiting ----


def poll(handle: Handle) -> bool:
    """Whether the operation has ended, well or badly. Never blocks."""
    return _C.poll(handle)


def synchronize(handle: Handle) -> Any:
    """Waits until the operation has ended and returns what its blocking form returns, or raises what went wrong."""
    return _C.synchronize(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it."""
    _C.barrier(process_set._impl or _impl_of(process_set))


def monitored_barrier(timeout_seconds: float, process_set: ProcessSet = global_process_set) -> None:
    """A barrier that fails in time, naming the ranks that have not come."""
    _C.monitored_barrier(timeout_seconds, process_set._impl or _impl_of(process_set))


def join(device: int = -1, *, process_set: ProcessSet = global_process_set) -> int:
    """For ranks that run out of data before others: waits until every rank has called it, and takes part meanwhile in
    what the others call, with what changes nothing. Returns the rank that came last. ``device`` says nothing here."""
    del device
    return _C.join(process_set._impl or _impl_of(process_set))
