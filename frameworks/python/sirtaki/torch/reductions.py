"""All-reduce and reduce-scatter. mpi_ops.py says what holds for all collectives."""

from __future__ import annotations

import enum
import warnings
from typing import List, Optional, Sequence, Tuple, Type

import torch

from sirtaki.torch._gradients import size_in_backward
from sirtaki.torch._library import _C
from sirtaki.torch.compression import Compression, Compressor, _number_of
from sirtaki.torch.process_sets import ProcessSet, _impl_of, global_process_set

__all__ = [
    "Adasum", "Average", "BitAnd", "BitOr", "BitXor", "Handle", "Max", "Min", "Product", "ReduceOp", "Sum",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "reducescatter", "reducescatter_async", "sparse_allreduce_async",
]

Handle = _C.Handle
Tensors = Sequence[torch.Tensor]
_Compression = Type[Compressor]


class ReduceOp(enum.IntEnum):
    """A ReduceOp says how a reduction combines. The numbers are those of reduce_op.h, and Horovod's as far as it has
    them."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5
    BitAnd = 6
    BitOr = 7
    BitXor = 8


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product
BitAnd, BitOr, BitXor = ReduceOp.BitAnd, ReduceOp.BitOr, ReduceOp.BitXor


def op_number(op: int) -> int:
    if not isinstance(op, int):
        raise TypeError(f"op is {op!r}; it must be Average, Sum, Adasum, Min, Max, Product, BitAnd, BitOr or BitXor")
    return op


def _op_of_average(average: bool, op: Optional[int]) -> int:
    """What Horovod had before ``op``."""
    if op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=4)
    return Average if average else Sum


def _arguments(
    average: Optional[bool], name: Optional[str], op: Optional[int], prescale_factor: float,
    postscale_factor: float, process_set: ProcessSet,
) -> Tuple[int, str, float, float, _C.ProcessSet]:
    """The arguments of an all-reduce, as the library has them."""
    if average is not None:
        op = _op_of_average(average, op)
    op = Average if op is None else op_number(op)
    return op, name or "", prescale_factor, postscale_factor, _impl_of(process_set)


def _built_in(compression: _Compression, op: int) -> Optional[int]:
    """The library's number; None where compress() and decompress() have to be called: Adasum has none within."""
    number = _number_of(compression)
    return None if number and op == Adasum else number


# ---- all-reduce ----


def allreduce(
    tensor: torch.Tensor, average: Optional[bool] = None, name: Optional[str] = None,
    compression: _Compression = Compression.none, op: Optional[int] = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the average, sum, … over the ranks, element by element: a new tensor, the same bits on every rank. Any
    shape. A sparse tensor's result is sparse."""
    arguments = _arguments(average, name, op, prescale_factor, postscale_factor, process_set)
    built_in = _built_in(compression, arguments[0])
    travelling, ctx = (tensor, None) if built_in is not None else compression.compress(tensor)
    result = _C.allreduce(travelling, *arguments, built_in or 0, False)
    return result if built_in is not None else compression.decompress(result, ctx)


def allreduce_async(
    tensor: torch.Tensor, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:
    arguments = _arguments(average, name, op, prescale_factor, postscale_factor, process_set)
    return _C.allreduce_async(tensor, *arguments, 0, False)


def allreduce_(
    tensor: torch.Tensor, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    arguments = _arguments(average, name, op, prescale_factor, postscale_factor, process_set)
    return _C.allreduce_(tensor, *arguments, 0, False)


def allreduce_async_(
    tensor: torch.Tensor, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:
    arguments = _arguments(average, name, op, prescale_factor, postscale_factor, process_set)
    return _C.allreduce_async_(tensor, *arguments, 0, False)


def grouped_allreduce(
    tensors: Tensors, average: Optional[bool] = None, name: Optional[str] = None,
    compression: _Compression = Compression.none, op: Optional[int] = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> List[torch.Tensor]:
    """Reduces several tensors as one operation: none of them starts before all are there on every rank."""
    arguments = _arguments(average, name, op, prescale_factor, postscale_factor, process_set)
    built_in = _built_in(compression, arguments[0])
    if built_in is not None:
        pairs = [(tensor, None) for tensor in tensors]
    else:
        pairs = [compression.compress(tensor) for tensor in tensors]
    results = _C.grouped_allreduce([tensor for tensor, _ in pairs], *arguments, built_in or 0, False)
    if built_in is not None:
        return results
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]


def grouped_allreduce_async(
    tensors: Tensors, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:
    arguments = _arguments(average, name, op, prescale_factor, postscale_factor, process_set)
    return _C.grouped_allreduce_async(list(tensors), *arguments, 0, False)


def grouped_allreduce_(
    tensors: Tensors, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> List[torch.Tensor]:
    arguments = _arguments(average, name, op, prescale_factor, postscale_factor, process_set)
    return _C.grouped_allreduce_(list(tensors), *arguments, 0, False)


def grouped_allreduce_async_(
    tensors: Tensors, average: Optional[bool] = None, name: Optional[str] = None, op: Optional[int] = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:
    arguments = _arguments(average, name, op, prescale_factor, postscale_factor, process_set)
    return _C.grouped_allreduce_async_(list(tensors), *arguments, 0, False)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    op: Optional[int] = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts the sum or average of sparse COO tensors. ``handle()`` and ``synchronize(handle)`` give the result,
    coalesced."""
    return _C.sparse_allreduce_async(tensor, *_arguments(None, name, op, 1.0, 1.0, process_set), 0, False)


# ---- reduce-scatter ----


def reducescatter(
    tensor: torch.Tensor, name: Optional[str] = None, compression: _Compression = Compression.none,
    op: int = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Returns this rank's rows of the reduction. Each rank gets equally many rows along the first dimension, and the
    first ranks one row more if they do not divide."""
    travelling, ctx = compression.compress(size_in_backward(tensor, process_set))
    result = _C.reducescatter(travelling, op, name or "", prescale_factor, postscale_factor, _impl_of(process_set))
    return compression.decompress(result, ctx)


def reducescatter_async(
    tensor: torch.Tensor, name: Optional[str] = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Handle:
    return _C.reducescatter_async(tensor, op, name or "", prescale_factor, postscale_factor, _impl_of(process_set))


def grouped_reducescatter(
    tensors: Tensors, name: Optional[str] = None, compression: _Compression = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> List[torch.Tensor]:
    pairs = [compression.compress(size_in_backward(tensor, process_set)) for tensor in tensors]
    given = [tensor for tensor, _ in pairs]
    results = _C.grouped_reducescatter(given, op, name or "", prescale_factor, postscale_factor, _impl_of(process_set))
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]


def grouped_reducescatter_async(
    tensors: Tensors, name: Optional[str] = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Handle:
    return _C.grouped_reducescatter_async(list(tensors), op, name or "", prescale_factor, postscale_factor, _impl_of(process_set))
