"""A state is what a training function has reached: commit() keeps it in memory, restore() brings it back, sync() makes
it equal on all ranks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Type

import torch

import sirtaki.torch as hvd
from sirtaki.torch._library import _C
from sirtaki.torch._shards import check_steps, is_cut, steps_of

from .sampler import ElasticSampler


class State:
    """The base of states. A state of your own has save(), restore() and sync().

    ``bcast_object`` gives rank 0's object to all ranks. ``get_rank`` gives this rank's number.
    """

    def __init__(self, bcast_object: Optional[Callable[[Any], Any]] = None,
                 get_rank: Optional[Callable[[], int]] = None):
        self._bcast_object = bcast_object or hvd.broadcast_object
        self._rank = get_rank or hvd.rank
        self._reset_callbacks: List[Callable[[], None]] = []
        self._commits = 0

    @property
    def commits(self) -> int:
        """The number of calls of commit()."""
        return self._commits

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
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, on all ranks at once, where ranks are to come or to go. Collective in an
        elastic job; in others it does nothing."""
        if not _C.is_elastic:
            return
        change = torch.tensor([1 if _C.elastic_change() else 0], dtype=torch.uint8)
        if hvd.broadcast(change, 0, name="sirtaki/elastic change").item():
            raise hvd.HostsUpdatedInterrupt()

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
        self._saved_state: Dict[str, Any] = kwargs
        self._bring_back()
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._bring_back(copy.deepcopy)

    def sync(self) -> None:
        if self._saved_state:
            now = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = self._bcast_object(now)
            self._bring_back(copy.deepcopy)

    def _bring_back(self, copied: Callable[[Any], Any] = lambda value: value) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copied(value))


class StateHandler:
    """A StateHandler keeps one kind of value for a TorchState. For a handler of your own see set_handler_registry()."""

    def __init__(self, value: Any):
        self.value = value

    def save(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no save()")

    def restore(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no restore()")

    def sync(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no sync()")

    def reset(self) -> None:
        """Called when the job was joined again."""

    def set_value(self, value: Any) -> None:
        """Puts another object in the place of the value."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """What has a state_dict() and a load_state_dict()."""

    def __init__(self, value: Any):
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # Some keep what they are given, and would change the copy.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(hvd.broadcast_object(self.value.state_dict(), root_rank=0))


class _TrainingHandler(_StateDictHandler):
    """Distributed optimizers and modules belong to the job that they were made in, until they are told of another."""

    def reset(self) -> None:
        # What backward() has made of a gradient is of a step that is not made.
        for parameter in self._parameters():
            parameter.grad = None
        for part in self._parts():
            if hasattr(part, "_sirtaki_rebuild"):
                part._sirtaki_rebuild()

    def _parameters(self) -> Iterable[torch.Tensor]:
        raise NotImplementedError

    def _parts(self) -> Iterable[Any]:
        return [self.value]


class ModelStateHandler(_TrainingHandler):
    def _parameters(self) -> Iterable[torch.Tensor]:
        return self.value.parameters()

    def _parts(self) -> Iterable[Any]:
        """A DistributedDataParallel may be the module itself, or in it."""
        return self.value.modules()

    def sync(self) -> None:
        hvd.broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_TrainingHandler):
    """Of a sharded optimizer it keeps the state of this rank's shards, which no other rank has."""

    def _parameters(self) -> Iterable[torch.Tensor]:
        return (parameter for group in self.value.param_groups for parameter in group["params"])

    def save(self) -> None:
        self._is_of_shards = is_cut(self.value)
        self._saved = copy.deepcopy(self.value.shard_state_dict() if self._is_of_shards else self.value.state_dict())

    def restore(self) -> None:
        load = self.value._sirtaki_load_shards if self._is_of_shards else self.value.load_state_dict
        load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        settings = getattr(self.value, "_sirtaki_settings", None)
        if settings is not None and settings.rest["shard"]:
            # Ranks commit by themselves: what one has committed last may be another's last but one.
            check_steps(steps_of(self.value), hvd.global_process_set, whole_is_given=True)
        hvd.broadcast_optimizer_state(self.value, root_rank=0)


class LRSchedulerStateHandler(_StateDictHandler):
    pass


class SamplerStateHandler(_StateDictHandler):
    def reset(self) -> None:
        self.value.reset()


_handler_registry: List[Tuple[Type, Type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> List[Tuple[Type, Type[StateHandler]]]:
    """Returns the kinds of values with their handlers; the first that fits is taken."""
    return _handler_registry


def set_handler_registry(registry: List[Tuple[Type, Type[StateHandler]]]) -> None:
    global _handler_registry
    _handler_registry = registry


def _handler_of(value: Any) -> Optional[StateHandler]:
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """The state of a training: models, optimizers, schedulers and samplers are kept by their state_dict, all else as
    ObjectState keeps it. Each is an attribute of the name that it is given by."""

    def __init__(self, model: Optional[torch.nn.Module] = None, optimizer: Optional[torch.optim.Optimizer] = None,
                 **kwargs: Any):
        given = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: _handler_of(value) for name, value in given.items()}
        self._handlers: Dict[str, StateHandler] = {name: handler for name, handler in handlers.items()
                                                   if handler is not None}
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        super().__init__(**{name: value for name, value in given.items() if name not in self._handlers})

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        # A fault on the way leaves the copies as they were, all of one commit.
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)
