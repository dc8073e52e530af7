"""The collectives have Horovod's names, arguments and defaults.

Every rank of the process set calls the same operation, under the same name, with tensors of the same type and shape; if
these differ, all of them raise MismatchError (a HorovodInternalError and a ValueError). Calls without a name are
matched by their order. The functions ``f(t)`` return a new tensor and are differentiable; ``f_(t)`` overwrite theirs;
the ``_async`` forms return a Handle at once, for synchronize() and poll().

They are in reductions.py and movement.py; the functions that wait are here, and the names that Horovod has in its
module of this name.
"""

from __future__ import annotations

from typing import Any

from sirtaki.common.exceptions import HorovodInternalError
from sirtaki.torch._library import _C
from sirtaki.torch.movement import *  # noqa: F403
from sirtaki.torch.observability import start_timeline, stop_timeline
from sirtaki.torch.process_sets import ProcessSet, _impl_of, add_process_set, global_process_set, remove_process_set
from sirtaki.torch.reductions import *  # noqa: F403
from sirtaki.torch.reductions import Handle
from sirtaki.torch.session import *  # noqa: F403


def poll(handle: Handle) -> bool:
    """Returns whether the operation has ended, well or badly. Never blocks."""
    return _C.poll(handle)


def synchronize(handle: Handle) -> Any:
    """Waits until the operation has ended and returns what its blocking form returns, or raises what went wrong."""
    return _C.synchronize(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called it. Collective."""
    _C.barrier(_impl_of(process_set))


def monitored_barrier(timeout_seconds: float, process_set: ProcessSet = global_process_set) -> None:
    """Waits as barrier() does, for a limit of seconds above 0: if ranks have not come by then, TimedOutError names
    them, and the job has failed. Collective."""
    _C.monitored_barrier(timeout_seconds, _impl_of(process_set))


def join(device: int = -1, *, process_set: ProcessSet = global_process_set) -> int:
    """Waits until every rank has called it, for ranks that run out of data before others. Meanwhile this rank takes
    part in what the others call, with what changes nothing. Returns the rank that came last. Collective. ``device`` has
    no effect."""
    del device
    return _C.join(_impl_of(process_set))
