"""Sirtaki raises these exceptions.

All are RuntimeErrors, like what torch raises for C++ errors. ``HorovodInternalError`` has Horovod's name, so that
programs that catch it still do so.
"""

from __future__ import annotations

__all__ = [
    "AbortedError", "BackendError", "DuplicateNameError", "HorovodInternalError", "HostsUpdatedInterrupt",
    "InvalidArgumentError", "MismatchError", "NotInitializedError", "PeerLostError", "PendingGradientsError",
    "ProtocolError", "ShutDownError", "SirtakiError", "TimedOutError", "UnsupportedError",
]


class SirtakiError(RuntimeError):
    """The base of the exceptions. ``code`` says what happened ("mismatch", "peer lost", …); ``rank``, ``host`` and
    ``tensor`` say where it began, and are -1 or empty if that is not known."""

    code: str = ""
    rank: int = -1
    host: str = ""
    tensor: str = ""


class HorovodInternalError(SirtakiError):
    """A collective has failed on all ranks that took part in it."""


class InvalidArgumentError(SirtakiError, ValueError):
    """A rank passed an argument that is wrong whatever the others do. Its peers get this error too."""

    code = "invalid argument"


class MismatchError(HorovodInternalError, ValueError):
    """The ranks asked for different things under one name. The job goes on, unless ranks wait for each other."""

    code = "mismatch"


class NotInitializedError(SirtakiError, ValueError):
    """The call came before init() or after shutdown(), or used an object of an earlier session."""

    code = "not initialized"


class DuplicateNameError(SirtakiError, ValueError):
    """The name is in flight on this rank."""

    code = "duplicate name"


class UnsupportedError(SirtakiError, NotImplementedError):
    """The library knows it, but this build cannot do it."""

    code = "unsupported"


class ShutDownError(HorovodInternalError):
    """A rank that had to take part has called shutdown() or ended."""

    code = "shut down"


class PeerLostError(HorovodInternalError):
    """A rank does not answer, or its connection failed."""

    code = "peer lost"


class TimedOutError(HorovodInternalError):
    """A wait passed its limit."""

    code = "timed out"


class AbortedError(HorovodInternalError):
    """A program called abort(), or a rank ended with an exit code other than 0."""

    code = "aborted"


class BackendError(HorovodInternalError):
    """MPI, CUDA or NCCL failed, or memory ran out."""

    code = "backend"


class ProtocolError(HorovodInternalError):
    """A peer sent a message that no correct peer sends."""

    code = "protocol"


class PendingGradientsError(InvalidArgumentError, AssertionError):
    """The program called zero_grad(), or step() of torch's GradScaler, while gradients were being reduced."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed; for elastic training."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod's name, for programs that catch it. Never raised: a torch that does not fit is an ImportError that says
    what was built."""


# The classes are found by the library's names for its codes.
CLASSES = {
    kind.code: kind
    for kind in (
        InvalidArgumentError, MismatchError, NotInitializedError, DuplicateNameError, UnsupportedError, ShutDownError,
        PeerLostError, TimedOutError, AbortedError, BackendError, ProtocolError,
    )
}
