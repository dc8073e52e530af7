"""All-gather, broadcast, all-to-all, and messages between two ranks. mpi_ops.py says what holds for all collectives."""

from __future__ import annotations

import operator
from typing import List, Optional, Sequence, Tuple, Union

import torch

from sirtaki.torch._gradients import mean_in_backward
from sirtaki.torch._library import _C
from sirtaki.torch.process_sets import ProcessSet, _impl_of, global_process_set

__all__ = [
    "allgather", "allgather_async", "alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "grouped_allgather", "grouped_allgather_async", "grouped_broadcast", "grouped_broadcast_",
    "grouped_broadcast_async", "grouped_broadcast_async_", "irecv", "isend", "recv_", "send",
]

Handle = _C.Handle
Tensors = Sequence[torch.Tensor]
AlltoallResult = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]


def allgather(
    tensor: torch.Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the tensors of all ranks, one after the other along the first dimension, in which they may differ."""
    return _C.allgather(mean_in_backward(tensor, process_set), name or "", _impl_of(process_set))


def allgather_async(
    tensor: torch.Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.allgather_async(tensor, name or "", _impl_of(process_set))


def grouped_allgather(
    tensors: Tensors, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[torch.Tensor]:
    given = [mean_in_backward(tensor, process_set) for tensor in tensors]
    return _C.grouped_allgather(given, name or "", _impl_of(process_set))


def grouped_allgather_async(
    tensors: Tensors, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.grouped_allgather_async(list(tensors), name or "", _impl_of(process_set))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the tensor of rank ``root_rank`` of the job. The others give one of the same type and shape."""
    return _C.broadcast(mean_in_backward(tensor, process_set), root_rank, name or "", _impl_of(process_set))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.broadcast_async(tensor, root_rank, name or "", _impl_of(process_set))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    return _C.broadcast_(tensor, root_rank, name or "", _impl_of(process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.broadcast_async_(tensor, root_rank, name or "", _impl_of(process_set))


def grouped_broadcast(
    tensors: Tensors, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[torch.Tensor]:
    given = [mean_in_backward(tensor, process_set) for tensor in tensors]
    return _C.grouped_broadcast(given, root_rank, name or "", _impl_of(process_set))


def grouped_broadcast_async(
    tensors: Tensors, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.grouped_broadcast_async(list(tensors), root_rank, name or "", _impl_of(process_set))


def grouped_broadcast_(
    tensors: Tensors, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[torch.Tensor]:
    return _C.grouped_broadcast_(list(tensors), root_rank, name or "", _impl_of(process_set))


def grouped_broadcast_async_(
    tensors: Tensors, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Handle:
    return _C.grouped_broadcast_async_(list(tensors), root_rank, name or "", _impl_of(process_set))


def _split_list(splits: Union[None, torch.Tensor, Sequence[int]]) -> List[int]:
    if splits is None:
        return []
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.dtype.is_floating_point or splits.dtype.is_complex:
            raise ValueError(f"splits is a {splits.dtype} tensor of {splits.dim()} dimensions; it must be 1D, of integers")
        return splits.tolist()
    return [operator.index(rows) for rows in splits]


def alltoall(
    tensor: torch.Tensor,
    splits: Union[None, torch.Tensor, Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> AlltoallResult:
    """Deals out each rank's rows to all, ``splits[i]`` of them to the i-th rank of the set (equally without
    ``splits``), and returns the rows for this rank. With ``splits`` it returns the tensor and the number of its rows
    that came from each rank."""
    result, received = _C.alltoall(tensor, _split_list(splits), name or "", _impl_of(process_set))
    return result if splits is None else (result, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Union[None, torch.Tensor, Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts an alltoall(); synchronize() gives a pair, without ``splits`` too, as in Horovod."""
    return _C.alltoall_async(tensor, _split_list(splits), name or "", _impl_of(process_set))


# ---- between two ranks ----


def send(tensor: torch.Tensor, to: int, tag: int = 0) -> None:
    """Sends the tensor to rank ``to`` of the job; returns when it may be written again. Not collective."""
    _C.send(tensor, to, tag)


def isend(tensor: torch.Tensor, to: int, tag: int = 0) -> Handle:
    return _C.isend(tensor, to, tag)


def recv_(tensor: torch.Tensor, source: int, tag: int = 0) -> torch.Tensor:
    """Overwrites the tensor with the next message from rank ``source`` with this tag, and returns it. Not
    collective."""
    return _C.recv_(tensor, source, tag)


def irecv(tensor: torch.Tensor, source: int, tag: int = 0) -> Handle:
    return _C.irecv(tensor, source, tag)
