"""A state is what a training function has reached: commit() keeps it in memory, restore() brings it back, sync() makes
it equal on all ranks. This is what states have in common, and what they do with plain values."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Sequence

import torch

import sirtaki.torch as hvd
from sirtaki.torch._library import _C


def _gpus_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    return {tensor.device for tensor in tensors if tensor.is_cuda} if torch.cuda.is_available() else set()


def await_gpus(tensors: Iterable[torch.Tensor]) -> None:
    """Waits until the GPUs have made what was launched for these tensors. What a collective has left there that was broken off is
    known then, and is the job's error."""
    devices = _gpus_of(tensors)
    for device in devices:
        torch.cuda.synchronize(device)
    if devices and _C.is_initialized() and not _C.is_deferred():  # before run() an elastic job has no collectives
        _C.check_job()


class _RandomState:
    """A random state is that of torch's own generators, of the CPU and of the GPUs that the tensors lie on, where a training was at `place`."""

    def __init__(self, place: int, tensors: Iterable[torch.Tensor]):
        self.place = place
        self._cpu = torch.get_rng_state()
        self._gpus = {device: torch.cuda.get_rng_state(device) for device in _gpus_of(tensors)}

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, kept in self._gpus.items():
            torch.cuda.set_rng_state(kept, device)


class _Steps:
    """How far a state is: by calls of step() and commit(), also those of the ranks that it was received from."""

    def __init__(self) -> None:
        self.place = 0
        self.committed_at = 0
        self.stepped_at = -1  # -1: there was no step() since the commit()
        self.is_receiving = False  # it has some parts of another rank's state, and not all yet

    def note_commit(self, place: int) -> None:
        self.place = self.committed_at = place
        self.stepped_at = -1
        self.is_receiving = False

    def note_step(self) -> None:
        self.place += 1
        self.stepped_at = self.place

    def may_go_back(self) -> bool:
        return self.stepped_at >= 0 and not self.is_receiving


class State:
    """The base of states. A state of your own has save(), restore() and sync().

    ``bcast_object`` gives rank 0's object to all ranks. ``get_rank`` gives this rank's number.

    The state of torch's own generators, of the CPU and of the GPUs that the state lies on, is kept at each step(), commit()
    and sync() of run(), and comes back when run() goes back there after a loss: draws, as those of dropout, are the same
    again. Each rank keeps its own, about 5 KB; restore() leaves it alone. ``keep_random_state = False`` switches it off.
    """

    keep_random_state = True

    def __init__(self, bcast_object: Optional[Callable[[Any], Any]] = None,
                 get_rank: Optional[Callable[[], int]] = None):
        self._bcast_object = bcast_object or hvd.broadcast_object
        self._rank = get_rank or hvd.rank
        self._reset_callbacks: List[Callable[[], None]] = []
        self._steps = _Steps()
        self._random: List[_RandomState] = []  # of the last two commit()s: all may go on from the first, if shards are lost
        self._random_at_step: List[_RandomState] = []  # of the last step() since then

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """The callbacks are called, in this order, each time that the job was joined again."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int = 0) -> None:
        """Nobody calls it: check_host_updates() asks."""

    def commit(self) -> None:
        """Keeps what is reached now, for restore() to bring back. It costs a copy of everything, so do not call it for
        every batch. Calls check_host_updates(). Collective in an elastic job."""
        self._commit()
        self.check_host_updates()

    def _commit(self) -> None:
        self.save()
        self._steps.note_commit(self._steps.place + 1)
        self._keep_random(of_step=False)

    def step(self) -> None:
        """Marks that a step is made, with all that the program notes of it. After a loss run() goes back to the last step()
        of a rank that is left, where that came after the last commit(). A TorchState keeps a copy of everything but
        trained parameters and optimizers' state, which lie there unchanged until the next step of an optimizer; ranks that
        have begun that, or have changed parameters otherwise, take the state of one that has not, or has called step()
        again. So it costs little, except with large models that are not trained. It does nothing, and run() goes back to
        the last commit(), where a model's trained parameters are in no optimizer of the state, or an optimizer's in no model
        of it, where an optimizer is sharded or has no hooks, and with states and handlers of other kinds. All ranks call it
        alike, behind the step of the optimizer and not within an accumulation; not collective."""

    def _go_back(self) -> None:
        self.restore()
        self._steps.note_commit(self._steps.committed_at)

    _newest_rank = 0  # whose state the last _sync_newest() has given to all

    def _sync_newest(self) -> None:
        self.sync()

    def _restores_at_change(self) -> bool:
        return False

    def _warn_of_missing_models(self) -> None:
        """Called when run() begins."""

    def _keep_random(self, of_step: bool) -> None:
        now = [_RandomState(self._steps.place, self._tensors())] if self.keep_random_state else []
        if not of_step:
            self._random = self._random[-1:] + now if now else []
        self._random_at_step = now if of_step else []

    def _go_on_with_random(self, goes_back: bool) -> None:
        """Draws go on where a loss has brought the training back to. A rank that has received a later place had made its
        draws before that."""
        kept = [one for one in self._random + self._random_at_step if one.place == self._steps.place]
        if goes_back and kept:
            kept[-1].restore()
        self._keep_random(of_step=False)

    def _tensors(self) -> Iterable[torch.Tensor]:
        """The tensors that GPUs may still work on."""
        return ()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, on all ranks at once, where ranks are to come or to go. Collective in an
        elastic job; in others it does nothing."""
        if self._is_to_change():
            raise hvd.HostsUpdatedInterrupt()

    def _is_to_change(self) -> bool:
        """The same on all ranks."""
        if not _C.is_elastic:
            return False
        change = torch.tensor([1 if _C.elastic_change() else 0], dtype=torch.uint8, device="cpu")
        return bool(hvd.broadcast(change, 0, name="sirtaki/commit() or check_host_updates()").item())

    def reset(self) -> None:
        """Does what has to be done when the job was joined again, before the callbacks."""

    def save(self) -> None:
        """Copies the state. Not collective."""
        raise NotImplementedError(f"{type(self).__name__} has no save()")

    def restore(self) -> None:
        """Brings the copy back. Not collective."""
        raise NotImplementedError(f"{type(self).__name__} has no restore()")

    def sync(self) -> None:
        """Gives all ranks rank 0's state, which is then the copy as well. Collective."""
        raise NotImplementedError(f"{type(self).__name__} has no sync()")


class ObjectState(State):
    """The state of Python objects that can be pickled. Each is an attribute of the name that it is given by."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, bcast_object: Optional[Callable[[Any], Any]] = None,
                 get_rank: Optional[Callable[[], int]] = None, **kwargs: Any):
        super().__init__(bcast_object, get_rank)
        for name in kwargs:
            if name != "step" and callable(getattr(type(self), name, None)):
                raise hvd.InvalidArgumentError(f"a state's value is called {name!r}, as one of its methods: give it another name")
        self._saved_state: Dict[str, Any] = kwargs
        self._bring_back()
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._bring_back(copy.deepcopy)

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._now())
            self._bring_back(copy.deepcopy)

    def _now(self) -> Dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _bring_back(self, copied: Callable[[Any], Any] = lambda value: value) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copied(value))
