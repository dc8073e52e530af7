"""Communication hooks reduce gradients in a way of the program's own."""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Type

import torch

from sirtaki.torch._library import _C
from sirtaki.torch.compression import Compressor
from sirtaki.torch.process_sets import ProcessSet
from sirtaki.torch.reductions import Average, Handle, allreduce_async_


class GradBucket:
    """A GradBucket holds gradients that are reduced together. Its functions are those of torch.distributed.GradBucket,
    as far as they mean something here. In the first step each gradient goes by itself, as a bucket of one; the buckets
    may change later, when parameters are added or something has failed: state that outlives a step belongs to the
    parameters, by their names."""

    def __init__(self, bucket: _C.GradientBucket) -> None:
        self._bucket = bucket

    def name(self) -> str:
        """A name that is the same on every rank and that nothing else uses: for one collective, or with more behind it
        for several."""
        return self._bucket.name + "/hook"

    def index(self) -> int:
        """The number of the bucket, from 0, the same on every rank. For a gradient that goes by itself it is the place
        of its parameter among the optimizer's."""
        return self._bucket.index

    def is_last(self) -> bool:
        """True for the last of the buckets. Only gradients that go by themselves come after it."""
        return self._bucket.is_last

    def buffer(self) -> torch.Tensor:
        """The gradients one after the other, 1-dimensional, with zeros for a parameter that has none on this rank. The
        buffer belongs to the hook until the gradients are synchronized."""
        return self._bucket.buffer

    def gradients(self) -> List[torch.Tensor]:
        """Views of the buffer, in the parameters' shapes."""
        return self._bucket.gradients

    def parameter_names(self) -> List[str]:
        return self._bucket.parameters

    def parameters(self) -> List[torch.Tensor]:
        return self._bucket.parameter_tensors


# Gives a Handle, a future of torch, a tensor, or a function without arguments that gives the tensor.
BucketHook = Callable[[GradBucket], Any]


def _finisher(started: Any) -> Callable[[], torch.Tensor]:
    if isinstance(started, torch.Tensor):
        return lambda: started
    if isinstance(started, torch.futures.Future):
        return lambda: _tensor_of(started.wait())
    if callable(started):  # a Handle is
        return lambda: _tensor_of(started())
    raise TypeError(
        f"the communication hook returned a {type(started).__name__}; it has to return a Handle, a "
        "torch.futures.Future, a tensor or a function that returns a tensor"
    )


def _tensor_of(result: Any) -> torch.Tensor:
    # Futures of DDP's hooks hold lists of one tensor.
    return result[0] if isinstance(result, (list, tuple)) else result


def c_hook(hook: BucketHook) -> Callable[[_C.GradientBucket], Callable[[], torch.Tensor]]:
    """The hook as the C++ library calls it, on the threads of backward()."""
    return lambda bucket: _finisher(hook(GradBucket(bucket)))


def _compressed(
    compression: Type[Compressor], process_set: ProcessSet, op: int, predivide: float, bucket: GradBucket
) -> Callable[[], torch.Tensor]:
    travelling, ctx = compression.compress(bucket.buffer())
    handle: Handle = allreduce_async_(
        travelling,
        name=bucket.name(),
        op=op,
        prescale_factor=1.0 / predivide,
        postscale_factor=predivide,
        process_set=process_set,
    )
    return lambda: compression.decompress(handle(), ctx)


def compressing_hook(
    compression: Type[Compressor], process_set: ProcessSet, op: int = Average, predivide: float = 1.0
) -> BucketHook:
    """The hook of a Compressor of the program's own."""
    return functools.partial(_compressed, compression, process_set, op, predivide)
