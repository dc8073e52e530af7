"""These functions start and end the membership in a job, say which of its ranks this process is, and what was built."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from typing import Any, Iterable, Mapping, Optional, Sequence, Tuple, Union

import torch

from sirtaki.common.exceptions import InvalidArgumentError
from sirtaki.torch import _topology
from sirtaki.torch import process_sets as _sets
from sirtaki.torch._library import _C
from sirtaki.torch.process_sets import ProcessSet, _require_init

__all__ = [
    "abort", "ccl_built", "check_extension", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built",
    "gloo_enabled", "gpu_available", "init", "is_homogeneous", "is_initialized", "local_rank", "local_size",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "num_rank_is_power_2", "pause_mpi", "rank",
    "resume_mpi", "rocm_built", "seed_all", "shutdown", "size", "xla_built",
]

# Processes that a launcher of MPI, sirtakirun or torchrun has started have these variables, and so has what they start.
_RANK_VARIABLES = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SIRTAKIRUN_START", "TORCHELASTIC_RUN_ID"}

_last_init: Tuple[Any, Any, Any] = (None, None, None)  # the arguments that made the session


def init(
    comm: Any = None,
    process_sets: Union[None, str, Iterable[Union[ProcessSet, Sequence[int]]]] = None,
    *,
    options: Optional[Mapping[str, Union[str, int, float, bool]]] = None,
) -> None:
    """Joins the job that ``sirtakirun`` or ``mpirun`` has started; without one, a job of one rank. Collective.

    ``comm``: a communicator of mpi4py, whose ranks are the job; or a list of ranks of MPI's world, which needs mpi4py
    unless it is all of them. ``process_sets``: sets that are made at once, see add_process_set(); if MPI_Comm_split has
    made their communicators, each rank gives its own. ``options``: by the names of docs/configuration.md; they override
    the environment.

    Calling it again does nothing, but raises ValueError if the arguments differ from the first call's.
    """
    global _last_init
    if _is_worker() and _RANK_VARIABLES & os.environ.keys() and not _C.is_initialized():
        raise InvalidArgumentError(
            "init() was called in a process that multiprocessing has started, such as a data loader's worker, which is "
            'not a rank of the job: put what only ranks do behind if __name__ == "__main__"'
        )
    sets = _sets._as_sets(process_sets)
    of_ranks = [one for one in sets if one.mpi_comm is None]
    is_first = not _C.is_initialized()
    if is_first and _C.is_elastic:
        _make_an_optimizer()
    communicator = _communicator(comm) if is_first else None
    if not is_first:
        if comm is not None and not _is_of_job(comm):
            raise InvalidArgumentError(f"init() was called again with another communicator: comm={comm!r}")
        if any(one.mpi_comm is not None and one.process_set_id is None for one in sets):
            raise InvalidArgumentError("init() was called again with other sets of communicators than the first time")
    _C.init(
        [(name, _option_text(value)) for name, value in (options or {}).items()],
        [one.ranks or [] for one in of_ranks],
        None if communicator is None else int(communicator.py2f()),
    )
    for one, impl in zip(of_ranks, _C.initial_process_sets()):
        _sets._register(one, impl)
    if is_first:
        _last_init = (comm, sets, options)
        _sets._communicator_of_job = communicator
        _topology.remember()
        if _C.is_elastic:  # nothing is agreed on before elastic.run(), and there are no communicators
            return
        try:
            _sets._add_of_communicators(sets)
        except Exception:  # on all ranks
            shutdown()
            raise


def _make_an_optimizer() -> None:
    """The first optimizer of a process imports much of torch, which takes seconds. In an elastic job it is made before the others
    wait for this rank."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def _is_worker() -> bool:
    """Whether multiprocessing has started this process; also while it still imports the program."""
    starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    return starting or multiprocessing.parent_process() is not None


def _init_again() -> None:
    """After shutdown(), as the last time: with the same sets, but not those that were added later."""
    comm, sets, options = _last_init
    init(comm, sets, options=options)


def _option_text(value: Union[str, int, float, bool]) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _communicator(comm: Any) -> Any:
    """A communicator of mpi4py; None for MPI's world."""
    if comm is None or hasattr(comm, "py2f"):
        return comm
    if not isinstance(comm, (list, tuple, range)):
        raise ValueError(f"comm is {comm!r}; it must be a communicator of mpi4py or a list of ranks")
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
    return world.Create_group(world.Get_group().Incl(ranks))


def _is_of_job(comm: Any) -> bool:
    """Whether init(comm) would make the job that there is."""
    is_communicator = hasattr(comm, "py2f")
    if not is_communicator and not isinstance(comm, (list, tuple, range)):
        return False
    job = _sets._communicator_of_job
    if job is None and not is_communicator:
        return not comm or list(comm) == list(range(size()))
    from mpi4py import MPI  # it is there: a communicator is its

    job = job or MPI.COMM_WORLD
    if is_communicator:
        return MPI.Comm.Compare(comm, job) in (MPI.IDENT, MPI.CONGRUENT)
    return MPI.Group.Compare(MPI.COMM_WORLD.Get_group().Incl(list(comm)), job.Get_group()) == MPI.IDENT


def shutdown() -> None:
    """Leaves the job, when all ranks do and what is under way is finished. Collective. It is called at exit if the
    program has not called it; a process that ends by an exception, or with an exit code, does not wait for the others,
    and they are told."""
    _C.shutdown()
    _topology.forget()
    _sets._forget_all()


def _end_before_mpi4py() -> None:
    """At exit the library ends by itself, and knows the exit code. But mpi4py, where it has started MPI, ends it first."""
    if "mpi4py.MPI" not in sys.modules or not _C.is_initialized():
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        _C.abort(f"the program exited by {type(error).__name__}: {error}")
    shutdown()


atexit.register(_end_before_mpi4py)


def is_initialized() -> bool:
    return _topology.is_known()


def rank() -> int:
    """Returns the rank of this process, 0 to size() - 1. Raises ValueError before init()."""
    return _topology.of_this_process("rank")


def size() -> int:
    """Returns the number of ranks in the job."""
    return _topology.of_this_process("size")


def local_rank() -> int:
    """Returns this process's rank among those of this host."""
    return _topology.of_this_process("local_rank")


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return _topology.of_this_process("local_size")


def cross_rank() -> int:
    """Returns this process's rank among the hosts that have this local rank."""
    return _topology.of_this_process("cross_rank")


def cross_size() -> int:
    """Returns the number of hosts that have this local rank."""
    return _topology.of_this_process("cross_size")


def is_homogeneous() -> bool:
    """Returns whether all hosts have the same number of ranks."""
    return _topology.of_this_process("is_homogeneous")


def abort(reason: str) -> None:
    """Ends the job with a reason: every pending and later call, on all ranks, raises HorovodInternalError. Not
    collective."""
    _C.abort(reason)


def seed_all(seed: int, different_per_rank: bool = True) -> int:
    """Seeds torch's generators on all ranks, by one seed for all or by one derived from it for each rank; returns this
    rank's seed. Collective."""
    return _C.seed_all(seed, different_per_rank)


def pause_mpi(timeout_seconds: float = 0.0) -> None:
    """Returns when every rank has called it and all that was submitted before is over. From then on the library makes no
    MPI call until resume_mpi(), and the program may, by mpi4py say; calls of the library wait. Collective over the job.
    ``timeout_seconds``: for all ranks to come; 0: only the limits of the session hold."""
    _C.pause_mpi(timeout_seconds)


def resume_mpi(timeout_seconds: float = 0.0) -> None:
    """Ends the pause, when every rank has called it. Collective over the job."""
    _C.resume_mpi(timeout_seconds)


# ---- what Horovod's programs ask about a build ----


def mpi_threads_supported() -> bool:
    """Returns False: the program must not call MPI while the library may, whatever thread level MPI has, since Open MPI
    can then lose what a message carries (docs/mpi.md). Between pause_mpi() and resume_mpi() it may. Raises ValueError
    before init()."""
    _require_init()
    return False


def mpi_enabled() -> bool:
    return _C.mpi_built


def mpi_built(verbose: bool = False) -> bool:
    return _C.mpi_built


def _absent(verbose: bool = False) -> bool:
    """Returns False: the library has nothing of this kind."""
    return False


gloo_enabled = gloo_built = ddl_built = ccl_built = rocm_built = xla_built = _absent


def nccl_built() -> int:
    """Returns the version of NCCL that the library knows, 22809 for 2.28.9; 0 with a torch without CUDA. NCCL is opened
    at run time."""
    return _C.nccl_version if torch.version.cuda is not None else 0


def cuda_built() -> bool:
    return torch.version.cuda is not None


def gpu_available(*_: Any) -> bool:
    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank != 0 and (num_rank & (num_rank - 1)) == 0


def check_extension(*_: Any) -> None:
    """Does nothing: a program that can import this module has the extension."""
