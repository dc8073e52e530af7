"""Starting and ending, who this process is among the others, and what was built."""

from __future__ import annotations

import atexit
import os
from typing import Any, Dict, Iterable, Mapping, Optional, Sequence, Tuple, Union

import torch

from sirtaki.common.exceptions import NotInitializedError
from sirtaki.torch import process_sets as _sets
from sirtaki.torch._library import _C
from sirtaki.torch.process_sets import ProcessSet

_started_in: Optional[int] = None  # the process that called init(), which a child of it is not
_known: Dict[str, Any] = {}  # who that process is, for its children
_last_init: Tuple[Any, Any, Any] = (None, None, None)  # the arguments that made the session


def init(
    comm: Any = None,
    process_sets: Union[None, str, Iterable[Union[ProcessSet, Sequence[int]]]] = None,
    *,
    options: Optional[Mapping[str, Union[str, int, float, bool]]] = None,
) -> None:
    """Joins the job that ``sirtakirun`` or ``mpirun`` has started; without one, a job of one rank. Collective.

    ``comm``: a communicator of mpi4py, whose ranks are the job; or a list of ranks of MPI's world, which needs mpi4py
    unless it is all of them. ``process_sets``: made at once, see add_process_set(). ``options``: by the names of
    docs/configuration.md; they beat the environment.

    Calling it again does nothing, but with other arguments than the first time it raises ValueError.
    """
    global _started_in, _last_init
    sets = _sets._as_sets(process_sets)
    is_first = not _C.is_initialized()
    _C.init(
        [(name, _option_text(value)) for name, value in (options or {}).items()],
        [one.ranks or [] for one in sets],
        _communicator(comm),
    )
    for one, impl in zip(sets, _C.initial_process_sets()):
        _sets._register(one, impl)
    if is_first:
        _last_init = (comm, sets, options)
        _known.update((name, getattr(_C, name)()) for name in _TOPOLOGY)
    if _started_in != os.getpid():
        _started_in = os.getpid()
        atexit.register(_shutdown_at_exit, _started_in)


def _init_again() -> None:
    """After shutdown(), as the last time: with the same sets, but not those that were added later."""
    comm, sets, options = _last_init
    init(comm, sets, options=options)


def _option_text(value: Union[str, int, float, bool]) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _communicator(comm: Any) -> Optional[int]:
    if comm is None:
        return None
    if hasattr(comm, "py2f"):
        return int(comm.py2f())
    if not isinstance(comm, (list, tuple, range)):
        raise ValueError(f"comm is {comm!r}; a communicator of mpi4py or a list of ranks is meant")
    ranks = list(comm)
    if not ranks:  # as in Horovod
        return None
    try:
        from mpi4py import MPI
    except ImportError:
        raise ValueError("init(comm=[ranks]) needs mpi4py; without it use process_sets") from None
    world = MPI.COMM_WORLD
    if ranks == list(range(world.Get_size())):
        return None
    if world.Get_rank() not in ranks:
        raise ValueError(f"rank {world.Get_rank()} of MPI's world is not in comm={ranks}")
    return int(world.Create_group(world.Get_group().Incl(ranks)).py2f())


def _shutdown_at_exit(process: int) -> None:
    if os.getpid() == process:
        shutdown()


def shutdown() -> None:
    """Leaves the job, when all ranks do and what is under way is finished. Called at exit if it was not before."""
    _C.shutdown()
    _known.clear()
    _sets._forget_all()


# A child of fork() has no part in the session, and collectives are refused there. But data loaders' workers ask who they
# are, and are told what their parent is.
_TOPOLOGY = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")


def _is_child() -> bool:
    return bool(_known) and _started_in != os.getpid()


def _topology(name: str) -> Any:
    return _known[name] if _is_child() else getattr(_C, name)()


def is_initialized() -> bool:
    return _C.is_initialized() or _is_child()


def rank() -> int:
    """Of this process, 0 to size() - 1. Raises ValueError before init()."""
    return _topology("rank")


def size() -> int:
    """Ranks in the job."""
    return _topology("size")


def local_rank() -> int:
    """Among the ranks of this host."""
    return _topology("local_rank")


def local_size() -> int:
    """Ranks on this host."""
    return _topology("local_size")


def cross_rank() -> int:
    """Among the hosts that have this local rank."""
    return _topology("cross_rank")


def cross_size() -> int:
    """Hosts that have this local rank."""
    return _topology("cross_size")


def is_homogeneous() -> bool:
    """Whether every host has as many ranks."""
    return _topology("is_homogeneous")


def abort(reason: str) -> None:
    """Ends the job with a reason: every pending and later call, on all ranks, raises HorovodInternalError."""
    _C.abort(reason)


def seed_all(seed: int, different_per_rank: bool = True) -> int:
    """Seeds torch's generators on all ranks, by one seed for all or by one derived from it for each; returns this
    rank's. Collective."""
    return _C.seed_all(seed, different_per_rank)


# ---- what Horovod's programs ask about a build ----


def mpi_threads_supported() -> bool:
    """Whether the program's threads may call MPI beside the library's. Raises ValueError before init()."""
    _require_init()
    return _C.mpi_threads_multiple()


def mpi_enabled() -> bool:
    return _C.mpi_built


def mpi_built() -> bool:
    return _C.mpi_built


def gloo_enabled() -> bool:
    return False


def gloo_built() -> bool:
    return False


def nccl_built() -> int:
    """The version of NCCL that it knows, 22809 for 2.28.9; 0 with a torch without CUDA. NCCL is opened at run time."""
    return 22809 if torch.version.cuda is not None else 0


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def cuda_built() -> bool:
    return torch.version.cuda is not None


def rocm_built() -> bool:
    return False


def xla_built() -> bool:
    return False


def gpu_available(*_: Any) -> bool:
    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank != 0 and (num_rank & (num_rank - 1)) == 0


def check_extension(*_: Any) -> None:
    """Nothing: that it could be imported says it all."""


def _require_init() -> None:
    if not _C.is_initialized():
        raise NotInitializedError("sirtaki has not been initialized; use hvd.init().")


# ---- seeing inside a run ----


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """From now on this rank writes what it does to ``file_path``: a file ending in .json, which rank 0 alone writes,
    or a folder with one for each rank. ``mark_cycles`` says nothing here: there are no cycles."""
    del mark_cycles
    _C.start_timeline(file_path)


def stop_timeline() -> None:
    """Everything up to now is in the file when this returns."""
    _C.stop_timeline()


def metrics() -> Dict[str, Any]:
    """What this rank has done since init(), in numbers; see docs/observability.md. Under "last_step" the same of the
    last step alone. Times are in seconds."""
    return _C.metrics()


def mark(text: str) -> None:
    """A moment of the program's own, in the timeline and the flight record."""
    _C.mark(text)


def memory_use() -> Dict[str, int]:
    """Of the memory for torch's large CPU tensors, in bytes; see docs/memory.md."""
    return _C.memory_use()


def release_memory() -> None:
    """Gives what is kept of it back to the system."""
    _C.release_memory()


def local_process_set() -> ProcessSet:
    """The ranks of this host."""
    return _existing(_C.local_process_set())


def cross_process_set() -> ProcessSet:
    """The ranks with this local rank, one a host."""
    return _existing(_C.cross_process_set())


def _existing(impl: _C.ProcessSet) -> ProcessSet:
    if impl.id == 0:
        return _sets.global_process_set
    return _sets._registered.get(impl.id) or _sets._register(ProcessSet(impl.ranks()), impl)
