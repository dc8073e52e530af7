"""A state is what a training function has reached: commit() keeps it in memory, restore() brings it back, sync() makes
it equal on all ranks."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Type, TypeVar

import torch

import sirtaki.torch as hvd
from sirtaki.torch._library import _C
from sirtaki.torch._shards import check_steps, is_cut, steps_of
from sirtaki.torch._structures import tensors_of

from .sampler import ElasticSampler


def await_gpus(tensors: Iterable[torch.Tensor]) -> None:
    """Waits until the GPUs have made what was launched for these tensors. What a collective has left there that was broken off is
    known then, and is the job's error."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    for device in devices:
        torch.cuda.synchronize(device)
    if devices and _C.is_initialized() and not _C.is_deferred():  # before run() an elastic job has no collectives
        _C.check_job()


class _Steps:
    """How far a state is: by calls of step() and commit(), also those of the ranks that it was received from."""

    def __init__(self) -> None:
        self.place = 0
        self.committed_at = 0
        self.stepped_at = -1  # -1: there was no step() since the commit()
        self.is_unchanged = False  # no optimizer has begun a step since
        self.is_receiving = False  # parts of another rank's state, and has not got all

    def note_commit(self, place: int) -> None:
        self.place = self.committed_at = place
        self.stepped_at = -1
        self.is_receiving = False

    def note_step(self) -> None:
        self.place += 1
        self.stepped_at = self.place
        self.is_unchanged = True

    def may_go_back(self) -> bool:
        return self.stepped_at >= 0 and self.is_unchanged and not self.is_receiving


class State:
    """The base of states. A state of your own has save(), restore() and sync().

    ``bcast_object`` gives rank 0's object to all ranks. ``get_rank`` gives this rank's number.
    """

    def __init__(self, bcast_object: Optional[Callable[[Any], Any]] = None,
                 get_rank: Optional[Callable[[], int]] = None):
        self._bcast_object = bcast_object or hvd.broadcast_object
        self._rank = get_rank or hvd.rank
        self._reset_callbacks: List[Callable[[], None]] = []
        self._steps = _Steps()

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
        self._steps.note_commit(self._steps.place + 1)
        self.check_host_updates()

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

    def _sync_newest(self) -> None:
        self.sync()

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
            self._saved_state = self._bcast_object(self._now())
            self._bring_back(copy.deepcopy)

    def _now(self) -> Dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

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

    root_rank = 0  # whose state sync() gives to all

    def __init__(self, value: Any):
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # Some keep what they are given, and would change the copy.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(hvd.broadcast_object(self.value.state_dict(), root_rank=self.root_rank))

    def save_step(self, stepped: Set[torch.Tensor]) -> None:
        """Copies what is not changed by an optimizer's own steps alone; ``stepped`` are the optimizers' parameters."""
        self._saved_at_step = copy.deepcopy(self.value.state_dict())

    def may_restore_step(self) -> bool:
        """Whether all that was not copied is still as it was."""
        return True

    def restore_step(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved_at_step))


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

    def _tensors(self) -> Iterable[torch.Tensor]:
        return self._parameters()

    def _parts(self) -> Iterable[Any]:
        return [self.value]


class ModelStateHandler(_TrainingHandler):
    def _parameters(self) -> Iterable[torch.Tensor]:
        return self.value.parameters()

    def _tensors(self) -> Iterable[torch.Tensor]:
        return (*self.value.parameters(), *self.value.buffers())

    def _parts(self) -> Iterable[Any]:
        """A DistributedDataParallel may be the module itself, or in it."""
        return self.value.modules()

    def sync(self) -> None:
        hvd.broadcast_parameters(self.value.state_dict(), root_rank=self.root_rank)

    def save_step(self, stepped: Set[torch.Tensor]) -> None:
        self._others = {name: parameter.detach().clone() for name, parameter in self.value.named_parameters()
                        if parameter not in stepped}
        self._buffers = [(module, {name: None if buffer is None else buffer.detach().clone()
                                   for name, buffer in module._buffers.items()}) for module in self.value.modules()]

    def may_restore_step(self) -> bool:
        now = dict(self.value.named_parameters())
        return (all(name in now and now[name].shape == kept.shape for name, kept in self._others.items())
                and all(set(module._buffers.keys()) == set(kept) for module, kept in self._buffers))

    def restore_step(self) -> None:
        now = dict(self.value.named_parameters())
        with torch.no_grad():
            for name, kept in self._others.items():
                now[name].copy_(kept)
            for module, buffers in self._buffers:
                for name, buffer in buffers.items():
                    _put_buffer(module, name, buffer)


def _put_buffer(module: torch.nn.Module, name: str, kept: Optional[torch.Tensor]) -> None:
    now = module._buffers[name]
    if now is not None and kept is not None and (now.shape, now.dtype, now.device) == (kept.shape, kept.dtype, kept.device):
        now.copy_(kept)
    else:  # the module has put another one in its place
        module._buffers[name] = None if kept is None else kept.clone()


class OptimizerStateHandler(_TrainingHandler):
    """Of a sharded optimizer it keeps the state of this rank's shards, which no other rank has."""

    _watched: Any = None

    def save_step(self, stepped: Set[torch.Tensor]) -> None:
        groups = self.value.param_groups
        self._groups = copy.deepcopy([{key: group[key] for key in group if key != "params"} for group in groups])
        self._noted = [parameter for parameter in self._parameters() if parameter in stepped]
        self._count = len(list(self._parameters()))
        self.note_versions()

    def note_versions(self) -> None:
        """They tell of changes that are not the optimizer's: of weights that were loaded or clipped, of another's step."""
        self._versions = [parameter._version for parameter in self._noted]

    def may_restore_step(self) -> bool:
        return (len(list(self._parameters())) == self._count
                and [parameter._version for parameter in self._noted] == self._versions)

    def restore_step(self) -> None:
        for group, kept in zip(self.value.param_groups, self._groups):
            group.update(copy.deepcopy(kept))

    def watch(self, steps: _Steps) -> None:
        """From now on the steps hear when the optimizer begins one."""
        if self._watched is self.value:
            return
        weak = weakref.ref(steps)  # an optimizer that the program has let go waits for no cycle to be found

        def begin(*_: Any) -> None:
            if (found := weak()) is not None:
                found.is_unchanged = False

        self.value.register_step_pre_hook(begin)
        self._watched = self.value

    def tells_steps(self) -> bool:
        """Wrappers that have not called Optimizer.__init__() have no hooks."""
        return hasattr(self.value, "_optimizer_step_pre_hooks")

    def is_sharded(self) -> bool:
        settings = getattr(self.value, "_sirtaki_settings", None)
        return settings is not None and bool(settings.rest["shard"])

    def _parameters(self) -> Iterable[torch.Tensor]:
        return (parameter for group in self.value.param_groups for parameter in group["params"])

    def save(self) -> None:
        self._is_of_shards = is_cut(self.value)
        self._saved = copy.deepcopy(self.value.shard_state_dict() if self._is_of_shards else self.value.state_dict())

    def restore(self) -> None:
        load = self.value._sirtaki_load_shards if self._is_of_shards else self.value.load_state_dict
        load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        if self.is_sharded():
            # Ranks commit by themselves: what one has committed last may be another's last but one.
            check_steps(steps_of(self.value), hvd.global_process_set, whole_is_given=True)
        without = [parameter for parameter in self._parameters() if parameter.grad is None]
        hvd.broadcast_optimizer_state(self.value, root_rank=self.root_rank)
        for parameter in without:  # zeros in their place would let weight decay change what a step does not reach
            parameter.grad = None


class LRSchedulerStateHandler(_StateDictHandler):
    pass


class SamplerStateHandler(_StateDictHandler):
    def reset(self) -> None:
        self.value.reset()


Handler = TypeVar("Handler", bound=StateHandler)

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

    _root_rank = 0  # whose state sync() gives to all

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
        await_gpus(self._tensors())  # the copies before stay where the job has failed
        for handler in self._handlers.values():
            handler.save()
        super().save()
        self._steps.note_commit(self._steps.place)

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()
        self._steps.note_commit(self._steps.committed_at)

    def sync(self) -> None:
        self._steps.is_receiving = hvd.rank() != self._root_rank
        # A fault on the way leaves the copies as they were, all of one commit.
        for handler in self._handlers.values():
            handler.sync()
        values = self._bcast_object(self._now()) if self._saved_state else {}
        await_gpus(self._tensors())
        for handler in self._handlers.values():
            handler.save()
        self._saved_state = values
        self._bring_back(copy.deepcopy)
        self._steps.note_commit(self._steps.place)

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    # ---- step(), and what run() does with it ----

    def step(self) -> None:
        if not self._knows_steps():
            return
        await_gpus(self._tensors())  # what a step has launched may be broken off
        self._steps.stepped_at = -1  # until all is kept
        kept = copy.deepcopy(self._now())
        stepped = self._stepped()
        for handler in self._of(_StateDictHandler):
            handler.save_step(stepped)
        self._kept_at_step = kept
        self._steps.note_step()
        _C.check_job()  # of the next step; on the CPU this one is made

    def _tensors(self) -> Iterable[torch.Tensor]:
        for handler in self._of(_TrainingHandler):
            yield from handler._tensors()
        yield from tensors_of(self._now())

    def _of(self, kind: Type[Handler]) -> List[Handler]:
        return [handler for handler in self._handlers.values() if isinstance(handler, kind)]

    def _takes_newest(self) -> bool:
        """Whether all of it is synchronized here: programs may have classes of their own, which take rank 0's."""
        kinds = (ModelStateHandler, OptimizerStateHandler, LRSchedulerStateHandler, SamplerStateHandler)
        ours = all(getattr(type(self), name) is getattr(TorchState, name) for name in ("save", "restore", "sync"))
        return ours and all(type(handler) in kinds for handler in self._handlers.values())

    def _knows_steps(self) -> bool:
        """Whether trained parameters are the models', and those of optimizers that tell when they begin a step."""
        optimizers = self._of(OptimizerStateHandler)
        if not self._takes_newest():
            return False
        if any(optimizer.is_sharded() or not optimizer.tells_steps() for optimizer in optimizers):
            return False
        for optimizer in optimizers:
            optimizer.watch(self._steps)
        stepped = self._stepped()
        of_models = {parameter for model in self._of(ModelStateHandler) for parameter in model._parameters()}
        return stepped <= of_models and not any(parameter.requires_grad for parameter in of_models - stepped)

    def _stepped(self) -> Set[torch.Tensor]:
        return {parameter for optimizer in self._of(OptimizerStateHandler) for parameter in optimizer._parameters()
                if parameter.requires_grad}

    def _go_back(self) -> None:
        if not self._is_at_step():
            return super()._go_back()
        for handler in self._of(_StateDictHandler):
            handler.restore_step()
        for name, value in copy.deepcopy(self._kept_at_step).items():
            setattr(self, name, value)
        self._steps.place = self._steps.stepped_at

    def _is_at_step(self) -> bool:
        """Whether what the step() before has not copied is still as it was then."""
        return self._steps.may_go_back() and all(handler.may_restore_step() for handler in self._of(_StateDictHandler))

    def _sync_newest(self) -> None:
        if not self._takes_newest():
            return self.sync()
        places = hvd.allgather_object(self._steps.place, name="sirtaki/elastic place")
        self._sync_from(places.index(max(places)))
        self._steps.note_commit(max(places))

    def _sync_from(self, root_rank: int) -> None:
        broadcast = self._bcast_object
        is_at_step = self._is_at_step()
        self._set_root(root_rank, functools.partial(hvd.broadcast_object, root_rank=root_rank))
        try:
            self.sync()
        except Exception:
            if is_at_step:  # for the root it counts as a change, too, that it has given its own
                for handler in self._of(OptimizerStateHandler):
                    handler.note_versions()
            raise
        finally:
            self._set_root(0, broadcast)

    def _set_root(self, root_rank: int, broadcast: Callable[[Any], Any]) -> None:
        self._root_rank = root_rank
        self._bcast_object = broadcast
        for handler in self._of(_StateDictHandler):
            handler.root_rank = root_rank

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
            self._steps.stepped_at = -1
        super().__setattr__(name, value)
