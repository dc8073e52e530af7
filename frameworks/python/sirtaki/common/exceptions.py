"""What sirtaki raises.

All are RuntimeErrors, as what torch raises of C++ is. ``HorovodInternalError`` has Horovod's name, so
that programs that catch it go on to do so.
"""

from __future__ import annotations


class SirtakiError(RuntimeError):
    """``code`` says what it is ("mismatch", "peer lost", …); ``rank``, ``host`` and ``tensor`` where it began, -1 or
    empty if that is not known."""

    code: str = ""
    rank: int = -1
    host: str = ""
    tensor: str = ""


class HorovodInternalError(SirtakiError):
    """A collective has failed on all ranks that took part in it."""


class InvalidArgumentError(SirtakiError, ValueError):
    """What a rank passed is wrong whatever the others do. Its peers get it too."""

    code = "invalid argument"


class MismatchError(HorovodInternalError, ValueError):
    """The ranks asked for different things under one name. The job can go on."""

    code = "mismatch"


class NotInitializedError(SirtakiError, ValueError):
    """Before init(), after shutdown(), or an object of an earlier session."""

    code = "not initialized"


class DuplicateNameError(SirtakiError, ValueError):
    """The name is in flight on this rank."""

    code = "duplicate name"


class UnsupportedError(SirtakiError, NotImplementedError):
    """Known, but not in this build."""

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
    """A program called abort()."""

    code = "aborted"


class BackendError(HorovodInternalError):
    """MPI or NCCL failed."""

    code = "backend"


class ProtocolError(HorovodInternalError):
    """A peer sent what no correct peer sends."""

    code = "protocol"


class PendingGradientsError(InvalidArgumentError, AssertionError):
    """zero_grad() between backward() and step()."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed; for elastic training."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
