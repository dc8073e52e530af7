"""Who this process is among the others, also in a child that it has forked.

Such a child has no part in the session, and collectives are refused there. But workers of data loaders ask who they are,
and are told what their parent is.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Optional

from sirtaki.torch._library import _C

_NAMES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")

_started_in: Optional[int] = None  # the process that called init()
_known: Dict[str, Any] = {}  # who that process is


def remember() -> None:
    """After init()."""
    global _started_in
    _started_in = os.getpid()
    _known.update((name, getattr(_C, name)()) for name in _NAMES)


def forget() -> None:
    """After shutdown()."""
    _known.clear()


def is_child() -> bool:
    return bool(_known) and _started_in != os.getpid()


def is_known() -> bool:
    return _C.is_initialized() or is_child()


def of_this_process(name: str) -> Any:
    """Raises NotInitializedError before init()."""
    return _known[name] if is_child() else getattr(_C, name)()
