"""Compression says what floating-point tensors travel as."""

from __future__ import annotations

from typing import Any, Optional, Tuple, Type

import torch


class Compressor:
    """Derive from this class to compress by a method of your own: tensors are compressed before they are reduced, and
    decompressed afterwards."""

    # The number by which the C++ library has it built in; None: the two functions are called.
    _built_in: Optional[int] = None

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """Returns the tensor that is to be reduced, and what decompress() has to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise NotImplementedError


def _number_of(compression: Any) -> Optional[int]:
    """The number of this class, and of none that it is derived from, whose functions it may have replaced."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(
            f"compression is {compression!r}; it must be Compression.none, fp16 or bf16, or be derived from Compressor"
        )
    return vars(compression).get("_built_in")


class NoneCompressor(Compressor):
    _built_in = 0

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _HalfCompressor(Compressor):
    _type: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:  # type: ignore[override]
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls._type), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_HalfCompressor):
    """Half the bytes of float32, 3 decimal digits, magnitudes up to 65504."""

    _built_in = 1
    _type = torch.float16


class BF16Compressor(_HalfCompressor):
    """Half the bytes of float32, 2 decimal digits, the range of float32."""

    _built_in = 2
    _type = torch.bfloat16


class Compression:
    """The values of the argument ``compression``. In reductions of gradients and all-reduces, sums are made in float32
    and rounded once; ranks of one host do not share a network, so what they exchange is not compressed. reducescatter()
    rounds first."""

    none: Type[Compressor] = NoneCompressor
    fp16: Type[Compressor] = FP16Compressor
    bf16: Type[Compressor] = BF16Compressor
