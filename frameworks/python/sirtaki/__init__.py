"""Sirtaki is data-parallel training. Programs use it by ``import sirtaki.torch as hvd``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sirtaki._build import version as __version__
from sirtaki._launcher import cmake_prefix_path

__all__ = ["__version__", "cmake_prefix_path", "run"]


if TYPE_CHECKING:
    from sirtaki.torch._run import run
else:

    def __getattr__(name: str) -> Any:
        # Late: it imports torch, which a program may want to do itself, and later.
        if name == "run":
            from sirtaki.torch._run import run

            return run
        raise AttributeError(f"module 'sirtaki' has no attribute {name!r}")
