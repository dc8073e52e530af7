"""Process sets are groups of ranks that run collectives among themselves."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional, Sequence, Union

from sirtaki.common.exceptions import InvalidArgumentError, NotInitializedError
from sirtaki.torch import _topology
from sirtaki.torch._library import _C

__all__ = [
    "ProcessSet", "add_process_set", "cross_process_set", "get_process_set_ids_and_ranks", "global_process_set",
    "is_process_set_included", "local_process_set", "remove_process_set",
]

_ALL = _C.ProcessSet()  # of all ranks, of whatever session there is


class ProcessSet:
    """A set of ranks. It can be used when init(process_sets=…) or add_process_set() has taken it.

    A set that is not ready delays no other set, and the names of calls are the set's own; sets may overlap. Roots and
    peers are ranks of the job everywhere.
    """

    mpi_comm: Any = None  # of mpi4py, if it was made of one

    def __init__(self, ranks_or_comm: Any) -> None:
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            ranks_or_comm = _ranks_of(ranks_or_comm)
        ranks = [ranks_or_comm] if isinstance(ranks_or_comm, int) else list(ranks_or_comm)
        if not all(isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet takes ranks or a communicator of mpi4py, not {ranks_or_comm!r}")
        self.ranks: Optional[List[int]] = sorted(set(ranks))
        self._impl: Optional[_C.ProcessSet] = None

    @property
    def process_set_id(self) -> Optional[int]:
        """The set's number, the same on every rank; None while it is in no session."""
        return None if self._impl is None else self._impl.id

    def size(self) -> Optional[int]:
        """Returns the number of its ranks; None while it is in no session."""
        return None if self._impl is None else self._impl.size()

    def rank(self) -> Optional[int]:
        """Returns this process's place in the set; None while it is in no session. Raises ValueError on a rank
        outside."""
        if self._impl is None:
            return None
        if not self._impl.included():
            raise InvalidArgumentError(f"this rank is not in {self}")
        return self._impl.rank()

    def included(self) -> Optional[bool]:
        """Returns whether this process is in the set; None before init()."""
        if self._impl is not None:
            return self._impl.included()
        return _C.rank() in (self.ranks or []) if _C.is_initialized() else None

    def _take(self, impl: _C.ProcessSet) -> "ProcessSet":
        self._impl = impl
        self.ranks = impl.ranks()
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        return self.ranks == other.ranks and self.process_set_id == other.process_set_id

    def __hash__(self) -> int:
        return hash(tuple(self.ranks or ()))

    # It is a reference: copies of what uses it, a module for instance, use the same.
    def __copy__(self) -> "ProcessSet":
        return self

    def __deepcopy__(self, memo: Any) -> "ProcessSet":
        return self

    def __reduce__(self) -> Any:
        return _find, (self.process_set_id, self.ranks)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """All ranks, of whatever session there is."""

    def __init__(self) -> None:
        self._impl = _ALL

    @property
    def mpi_comm(self) -> Any:  # type: ignore[override]
        return _communicator_of_job

    @property
    def ranks(self) -> Optional[List[int]]:  # type: ignore[override]
        size = self.size()
        return None if size is None else list(range(size))

    def size(self) -> Optional[int]:
        return _topology.of_this_process("size") if _topology.is_known() else None

    def rank(self) -> Optional[int]:
        return _topology.of_this_process("rank") if _topology.is_known() else None

    def included(self) -> Optional[bool]:
        return True if _topology.is_known() else None


global_process_set: ProcessSet = _GlobalProcessSet()

# The sets of this session, by their numbers; and the other objects that an init() that says again what is has made sets of.
_registered: Dict[int, ProcessSet] = {}
_others: List[ProcessSet] = []

# The communicator of mpi4py that init() was given; None: MPI's world.
_communicator_of_job: Any = None


def _ranks_of(communicator: Any) -> List[int]:
    from mpi4py import MPI  # it is there: the communicator is its

    group = communicator.Get_group()
    job = (_communicator_of_job or MPI.COMM_WORLD).Get_group()
    ranks = list(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), job))
    if MPI.UNDEFINED in ranks:
        raise ValueError("the communicator has ranks that are not in the job")
    return ranks


def _require_init() -> None:
    if not _C.is_initialized():
        raise NotInitializedError("sirtaki has not been initialized; use hvd.init().")


def _impl_of(process_set: ProcessSet) -> _C.ProcessSet:
    """What the C++ library takes; refuses a set of no session, whose ranks would be mistaken for all."""
    try:
        impl = process_set._impl
    except AttributeError:
        raise TypeError(f"process_set is {process_set!r}; it must be a ProcessSet") from None
    if impl is None:
        _require_init()
        raise InvalidArgumentError(f"{process_set} is not registered: give it to init() or add_process_set()")
    return impl


def _register(process_set: ProcessSet, impl: _C.ProcessSet) -> ProcessSet:
    process_set._take(impl)
    if _registered.setdefault(impl.id, process_set) is not process_set:
        _others.append(process_set)
    return process_set


def _find(number: Optional[int], ranks: List[int]) -> ProcessSet:
    """What a pickled set is here: the one of that number, if it has those ranks; else one of no session."""
    if number == 0:
        return global_process_set
    found = _registered.get(-1 if number is None else number)
    return found if found is not None and found.ranks == ranks else ProcessSet(ranks)


def _forget_all() -> None:
    """After shutdown()."""
    global _communicator_of_job
    for process_set in (*_registered.values(), *_others):
        process_set._impl = None
    _registered.clear()
    _others.clear()
    _communicator_of_job = None


def _as_sets(process_sets: Union[None, str, Iterable[Union[ProcessSet, Sequence[int]]]]) -> List[ProcessSet]:
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() == "dynamic":  # they always may be added
            return []
        raise ValueError(f"process_sets is {process_sets!r}; it must be a list of process sets or 'dynamic'")
    return [one if isinstance(one, ProcessSet) else ProcessSet(one) for one in process_sets]


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Takes a new set into the session, and returns it. Collective over all ranks of the job, also those outside the
    set.

    Raises ValueError on every rank for ranks that are not in the job, or if the ranks of the job name different ones.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set._impl is not None:
        raise ValueError(f"{process_set} is registered already")
    return _register(process_set, _C.add_process_set(process_set.ranks or []))


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a set. Returns False if it was not registered, and for the set of all ranks. Collective over all ranks of
    the job."""
    impl = process_set._impl
    if impl is None or process_set is global_process_set:
        return False
    _C.remove_process_set(impl)
    for same in (process_set, _registered.pop(impl.id, process_set), *_others):
        if same.process_set_id == impl.id:
            same._impl = None
    return True


def _add_of_communicators(sets: List[ProcessSet]) -> None:
    """Those that init() was given. Collective over all ranks of the job, with sets or without.

    MPI_Comm_split gives each part of the ranks a communicator of its own. So there is a set for what any rank has given,
    and where one has given the same ranks several times, as many.
    """
    from sirtaki.torch.functions import agreed, allgather_object  # which are made of what is here

    def described() -> Dict[Any, ProcessSet]:
        mine: Dict[Any, ProcessSet] = {}
        for one in sets:
            if one.mpi_comm is not None:
                # The ranks are the job's; the communicator may be older than the job, or be freed since.
                ranks = tuple(sorted(_ranks_of(one.mpi_comm)) if one.mpi_comm else one.ranks or [])
                mine[ranks, sum(ranks == other for other, _ in mine)] = one
        return mine

    mine = agreed(described)
    of_ranks = allgather_object(list(mine), "sirtaki/the exchange of the communicators' ranks")
    for key in dict.fromkeys(key for theirs in of_ranks for key in theirs):
        ranks = list(key[0])
        _register(mine.get(key) or ProcessSet(ranks), _C.add_process_set(ranks))


def is_process_set_included(process_set_id: int) -> bool:
    """Returns whether this process is in the set of that number."""
    if process_set_id == 0:
        return True
    if process_set_id not in _registered:
        raise ValueError(f"there is no process set {process_set_id}")
    return bool(_registered[process_set_id].included())


def get_process_set_ids_and_ranks() -> Dict[int, List[int]]:
    """Returns the ranks of each set, by its number."""
    if not _topology.is_known():
        _require_init()
    sets = {0: list(global_process_set.ranks or [])}
    sets.update((number, list(one.ranks or [])) for number, one in sorted(_registered.items()))
    return sets


def local_process_set() -> ProcessSet:
    """Returns the set of this host's ranks. Not collective."""
    return _existing(_C.local_process_set())


def cross_process_set() -> ProcessSet:
    """Returns the set of the ranks with this local rank, one a host. Not collective."""
    return _existing(_C.cross_process_set())


def _existing(impl: _C.ProcessSet) -> ProcessSet:
    if impl.id == 0:
        return global_process_set
    return _registered.get(impl.id) or _register(ProcessSet(impl.ranks()), impl)
