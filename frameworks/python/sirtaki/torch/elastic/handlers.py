"""A handler keeps one kind of value for a TorchState: models, optimizers, schedulers, samplers, and what a program adds."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any, Callable, Iterable, List, Optional, Set, Tuple, Type

import torch

import sirtaki.torch as hvd
from sirtaki.torch._library import _C
from sirtaki.torch._shards import ReceivedShards, check_steps, is_cut, steps_of
from sirtaki.torch.amp import forget_unscaled
from sirtaki.torch.functions import _named
from sirtaki.torch.optimizer_state import part_of, shape_of

from .sampler import ElasticSampler


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

    def describe(self) -> Any:
        """What the ranks compare before one gives its state to the others."""

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

    def named_tensors(self) -> List[Tuple[str, torch.Tensor]]:
        return _named(self._split_state()[0])

    def _split_state(self) -> Tuple[Dict[str, torch.Tensor], Dict[str, Any]]:
        """The tensors of the state, and what modules' get_extra_state() has put there beside them."""
        state = self.value.state_dict(keep_vars=True)
        return ({name: value for name, value in state.items() if value is None or isinstance(value, torch.Tensor)},
                {name: value for name, value in state.items() if value is not None and not isinstance(value, torch.Tensor)})

    def describe(self) -> Any:
        return [*((name, str(tensor.dtype), tuple(tensor.shape), *part_of(tensor)) for name, tensor in self.named_tensors()),
                *self._split_state()[1]]

    def sync(self) -> None:
        tensors, others = self._split_state()
        hvd.broadcast_parameters(tensors, root_rank=self.root_rank)
        if others:
            self.value.load_state_dict(hvd.broadcast_object(others, root_rank=self.root_rank), strict=False)

    def look(self) -> None:
        """Notes the modules and parameters that there are, for a step()."""
        self._modules = list(self.value.modules())
        self._named = [(module, name, parameter) for module in self._modules
                       for name, parameter in module._parameters.items() if parameter is not None]

    def parameters_of_last_look(self) -> Iterable[torch.Tensor]:
        return (parameter for _, _, parameter in self._named)

    def save_step(self, stepped: Set[torch.Tensor]) -> None:
        with torch.no_grad():
            self._others = [(module, name, parameter.clone()) for module, name, parameter in self._named
                            if parameter not in stepped]
            self._buffers = [(module, {name: None if buffer is None else buffer.clone()
                                       for name, buffer in module._buffers.items()})
                             for module in self._modules if module._buffers]

    def may_restore_step(self) -> bool:
        now = [(module._parameters.get(name), kept) for module, name, kept in self._others]
        return (all(parameter is not None and parameter.shape == kept.shape for parameter, kept in now)
                and all(set(module._buffers.keys()) == set(kept) for module, kept in self._buffers))

    def restore_step(self) -> None:
        with torch.no_grad():
            for module, name, kept in self._others:
                module._parameters[name].copy_(kept)
            for module, buffers in self._buffers:
                for name, buffer in buffers.items():
                    _put_buffer(module, name, buffer)


def _put_buffer(module: torch.nn.Module, name: str, kept: Optional[torch.Tensor]) -> None:
    now = module._buffers[name]
    if now is not None and kept is not None and (now.shape, now.dtype, now.device) == (kept.shape, kept.dtype, kept.device):
        now.copy_(kept)
    else:  # the module has put another one in its place
        module._buffers[name] = None if kept is None else kept.clone()


# The shards that a rank gives to others begin with one of these, as those of C++'s ShardCopies: shard_over="host" lets each host have
# all shards, and what was received may be there again.
_OF_JOB, _AGAIN, _OF_EACH_HOST = b"1", b"2", b"3"


class OptimizerStateHandler(_TrainingHandler):
    """Of a sharded optimizer it keeps the state of this rank's shards, which no other rank has but by the copies that a state
    makes in an elastic job."""

    _watched: Any = None
    _begun = 0  # steps of the optimizer
    # The state has these copies: returns the last of this rank's. None: it makes none.
    copied_shards: Optional[Callable[[], bytes]] = None
    saves_shards = True  # False while the state has just copied them

    def describe(self) -> Any:
        return shape_of(self.value)

    def shards(self) -> bytes:
        """What this rank has of the optimizer's state alone; nothing if that is whole."""
        if not is_cut(self.value):
            return b""
        file = io.BytesIO()
        file.write(_OF_EACH_HOST if self.value._sirtaki_settings.rest["shard_over"] == "host" else _OF_JOB)
        torch.save(self.value.shard_state_dict(), file)
        return file.getvalue()

    def receive_shards(self, shards: bytes, is_first: bool, is_last: bool) -> None:
        """They are called with those of each rank of an earlier generation."""
        if is_first:
            self._received = ReceivedShards(self.value)
        if shards[:1] != _AGAIN:
            self._received.add(_loaded(shards))
        if is_last:
            self._received.load()
            del self._received

    def reset(self) -> None:
        if self.copied_shards is not None:
            self.value._sirtaki_shards.drop(self.value)
        super().reset()

    def save_step(self, stepped: Set[torch.Tensor]) -> None:
        groups = self.value.param_groups
        self._groups = copy.deepcopy([{key: group[key] for key in group if key != "params"} for group in groups])
        parameters = list(self._parameters())
        self._count = len(parameters)
        self._noted = [parameter for parameter in parameters if parameter in stepped]
        self._begun_at_step = self._begun
        self.note_versions()

    def note_versions(self) -> None:
        """They tell of changes that are not the optimizer's: of weights that were loaded or clipped, of another's step."""
        self._versions = [parameter._version for parameter in self._noted]

    def may_restore_step(self) -> bool:
        return (self._begun == self._begun_at_step and len(list(self._parameters())) == self._count
                and [parameter._version for parameter in self._noted] == self._versions)

    def restore_step(self) -> None:
        for group, kept in zip(self.value.param_groups, self._groups):
            group.update(copy.deepcopy(kept))

    def watch(self) -> None:
        """From now on the steps count that the optimizer begins."""
        if self._watched is self.value:
            return
        weak = weakref.ref(self)  # an optimizer that the program has let go waits for no cycle to be found

        def begin(*_: Any) -> None:
            if (found := weak()) is not None:
                found._begun += 1

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
        if self._is_of_shards:
            self._place = (hvd.rank(), hvd.size(), _C.elastic_generation())
        if self._is_of_shards and not self.saves_shards:
            self._saved = None
        else:
            self._saved = copy.deepcopy(self.value.shard_state_dict() if self._is_of_shards else self.value.state_dict())

    def restore(self) -> None:
        place = (hvd.rank(), hvd.size(), _C.elastic_generation())
        if self._is_of_shards and self._place != place and self.copied_shards is not None:
            self.value._sirtaki_shards.drop(self.value)  # the ranks' shards are others now, and come from all of them
            return
        if self._is_of_shards and self._place[:2] != place[:2]:
            raise hvd.InvalidArgumentError(
                f"the optimizer is sharded, and a rank that is lost takes its shards of the state with it: this is rank "
                f"{hvd.rank()} of {hvd.size()}, and was rank {self._place[0]} of {self._place[1]}. Go on from the last "
                "checkpoint by sirtakirun --max-restarts, or shard nothing in an elastic job")
        load = self.value._sirtaki_load_shards if self._is_of_shards else self.value.load_state_dict
        if self._saved is None and self.copied_shards is not None:
            load(_loaded(self.copied_shards()))
        else:
            load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        if self.is_sharded():
            # Ranks commit by themselves: what one has committed last may be another's last but one.
            check_steps(steps_of(self.value), hvd.global_process_set, whole_is_given=True)
        without = [parameter for parameter in self._parameters() if parameter.grad is None]
        hvd.broadcast_optimizer_state(self.value, root_rank=self.root_rank)
        for parameter in without:  # zeros in their place would let weight decay change what a step does not reach
            parameter.grad = None


def _loaded(shards: bytes) -> Any:
    return torch.load(io.BytesIO(shards[1:]), map_location="cpu", weights_only=False)  # of this job's own ranks


class LRSchedulerStateHandler(_StateDictHandler):
    pass


class GradScalerStateHandler(_StateDictHandler):
    def describe(self) -> Any:
        return f"a GradScaler, {'enabled' if self.value.is_enabled() else 'disabled'}"

    def restore(self) -> None:
        forget_unscaled(self.value)
        super().restore()

    def restore_step(self) -> None:
        forget_unscaled(self.value)
        super().restore_step()


class SamplerStateHandler(_StateDictHandler):
    def describe(self) -> Any:
        return f"{len(self.value.dataset)} samples"  # ranks with other numbers make other steps

    def reset(self) -> None:
        self.value.reset()


_handler_registry: List[Tuple[Type, Type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (torch.amp.GradScaler, GradScalerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> List[Tuple[Type, Type[StateHandler]]]:
    """Returns the kinds of values with their handlers; the first that fits is taken."""
    return _handler_registry


def set_handler_registry(registry: List[Tuple[Type, Type[StateHandler]]]) -> None:
    """Puts other kinds of values, with their handlers, in the place of those that are known. A program adds its own by
    ``set_handler_registry([(Kind, Handler)] + get_handler_registry())``, on all ranks and before it makes a state."""
    global _handler_registry
    _handler_registry = registry


def _handler_of(value: Any) -> Optional[StateHandler]:
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return None
