"""The state of a training has models, optimizers, schedulers and samplers beside plain values."""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import itertools
import pickle
import warnings
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple, Type, TypeVar

import torch

import sirtaki.torch as hvd
from sirtaki.torch._library import _C
from sirtaki.torch._structures import tensors_of
from sirtaki.torch.functions import _dumps, agreed, packed, unpacked
from sirtaki.torch.optimizer_state import pack_optimizers, take_state, unpack_optimizers

from .base import ObjectState, State, await_gpus  # noqa: F401
from .handlers import (GradScalerStateHandler, LRSchedulerStateHandler, ModelStateHandler, OptimizerStateHandler,
                       SamplerStateHandler, StateHandler, _StateDictHandler, _TrainingHandler, _handler_of)
from .handlers import get_handler_registry, set_handler_registry  # noqa: F401  (where Horovod has them)

Handler = TypeVar("Handler", bound=StateHandler)

# In the place of where all else of a state was copied: no shards were kept yet; it was copied without them since they were.
_NO_COPIES, _WITHOUT_COPIES = -1, -2


class TorchState(ObjectState):
    """The state of a training: models, optimizers, schedulers and samplers are kept by their state_dict, all else as
    ObjectState keeps it. Each is an attribute of the name that it is given by."""

    _copy_shards: Optional[int] = 0
    _root_rank = 0  # whose state sync() gives to all
    _shards_at = _NO_COPIES  # where all else was copied that belongs to the copies of shards
    _shards_to_receive = 0  # by sync(): of so many ranks
    _steps_since_copy = 0
    _has_warned = False  # that step() keeps nothing
    _leaves = False  # this generation, as ranks are to come or to go

    def __init__(self, model: Optional[torch.nn.Module] = None, optimizer: Optional[torch.optim.Optimizer] = None,
                 **kwargs: Any):
        given = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: _handler_of(value) for name, value in given.items()}
        self._copies = _C.ShardCopies()
        self._handlers: Dict[str, StateHandler] = {name: handler for name, handler in handlers.items()
                                                   if handler is not None}
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        super().__init__(**{name: value for name, value in given.items() if name not in self._handlers})

    @property
    def copy_shards(self) -> Optional[int]:
        """How often the partner of each rank, on another host if there is one, gets a copy of that rank's shards of the
        optimizers' state, in an elastic job: at each commit() where it is 0; at each of so many calls of step() as well where it
        is more, each of which then is a commit() that does not call check_host_updates(); never where it is None."""
        return self._copy_shards

    @copy_shards.setter
    def copy_shards(self, steps: Optional[int]) -> None:
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 0):
            raise ValueError(f"copy_shards = {steps!r}: it is a number of steps, 0 for each commit() alone, or None for no copies")
        self._copy_shards = steps

    def save(self) -> None:
        await_gpus(self._tensors())  # the copies before stay where the job has failed
        for handler in self._handlers.values():
            handler.save()
        super().save()
        self._steps.note_commit(self._steps.place)
        self._note_without_copies()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()
        self._steps.note_commit(self._steps.committed_at)

    def sync(self) -> None:
        values = self._receive()
        if not self._keeps_shards():
            return self._save_received(values)
        place = self._steps.place + 1  # a boundary of its own: shards are not those of the one before
        self._keep_shards(place)
        self._save_without_shards(lambda: self._save_received(values))
        self._steps.note_commit(place)
        self._keep_random(of_step=False)
        self._note_copies(place)

    def _receive(self) -> Dict[str, Any]:
        self._steps.is_receiving = hvd.rank() != self._root_rank
        # A fault on the way leaves the copies as they were, all of one commit.
        sharded = self._sharded() if self._shards_to_receive else []
        for handler in self._handlers.values():
            if handler not in sharded:
                handler.sync()
        self._receive_shards(sharded)
        values = self._bcast_object(self._now()) if self._saved_state else {}
        await_gpus(self._tensors())
        return values

    def _save_received(self, values: Dict[str, Any]) -> None:
        for handler in self._handlers.values():
            handler.save()
        self._saved_state = values
        self._bring_back(copy.deepcopy)
        self._steps.note_commit(self._steps.place)
        self._note_without_copies()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    # ---- the shards of optimizers, in an elastic job ----

    def _sharded(self) -> List[OptimizerStateHandler]:
        return [handler for handler in self._of(OptimizerStateHandler) if handler.is_sharded()]

    def _keeps_shards(self) -> bool:
        sharded = self._sharded()
        keeps = (_C.is_elastic and self._takes_newest() and bool(sharded)
                 and all(handler.value.process_set is hvd.global_process_set for handler in sharded))
        for number, handler in enumerate(sharded if keeps else ()):
            handler.copied_shards = functools.partial(lambda copies, place: copies.mine()[place], self._copies, number)
        return keeps

    def _keep_shards(self, place: int) -> None:
        """Collective."""
        await_gpus(self._tensors())
        shards = [handler.shards() for handler in self._sharded()]
        if self._leaves:
            self._copies.keep_for_change(place, shards)
        else:
            self._copies.keep(place, shards, self.copy_shards is not None)

    def _note_copies(self, place: int) -> None:
        self._shards_at = place
        self._steps_since_copy = 0

    def _note_without_copies(self) -> None:
        if self._shards_at != _NO_COPIES:
            self._shards_at = _WITHOUT_COPIES

    def _receive_shards(self, sharded: List[OptimizerStateHandler]) -> None:
        for shard in range(self._shards_to_receive):
            for handler, shards in zip(sharded, self._copies.receive(shard)):
                if shards:
                    handler.receive_shards(shards, shard == 0, shard + 1 == self._shards_to_receive)
                elif shard == 0:  # the optimizer has made no step
                    handler.sync()

    def _commit(self) -> None:
        if not self._keeps_shards():
            return super()._commit()
        place = self._steps.place + 1
        self._keep_shards(place)
        self._save_without_shards(super()._commit)
        self._note_copies(place)

    def _save_without_shards(self, save: Callable[[], None]) -> None:
        for handler in self._sharded():
            handler.saves_shards = False
        try:
            save()
        finally:
            for handler in self._sharded():
                handler.saves_shards = True

    def check_host_updates(self) -> None:
        if not self._is_to_change():
            return
        if self._keeps_shards():  # ranks have other shards after the change, and some that have some now may not be there
            self._leaves = True
            try:
                self._commit()
            finally:
                self._leaves = False
        raise hvd.HostsUpdatedInterrupt()

    def _restores_at_change(self) -> bool:
        """Shards are those of the last commit, and so is all else then: it may be a program that has raised the interrupt."""
        return self._keeps_shards()

    def _is_to_change(self) -> bool:
        is_to_change = super()._is_to_change()
        self._copies.confirm()
        return is_to_change

    # ---- step(), and what run() does with it ----

    def step(self) -> None:
        if self.copy_shards and self._keeps_shards():
            self._steps_since_copy += 1
            if self._steps_since_copy >= self.copy_shards:
                self._commit()
                hvd.barrier()  # nobody leaves it before all have the copies, and those of the commit before may go
                self._copies.confirm()
            return
        stepped = self._stepped()
        if why := self._why_steps_are_unknown(stepped):
            if not self._has_warned and self._rank() == 0:
                warnings.warn("elastic.TorchState: step() keeps nothing, and a loss goes back to the last commit(): " + why,
                              stacklevel=2)
            self._has_warned = True
            return
        await_gpus(self._tensors())  # what a step has launched may be broken off
        self._steps.stepped_at = -1  # until all is kept
        kept = copy.deepcopy(self._now())
        for handler in self._of(_StateDictHandler):
            handler.save_step(stepped)
        self._kept_at_step = kept
        self._steps.note_step()
        self._keep_random(of_step=True)
        _C.check_job()  # of the next step; on the CPU this one is made

    def _tensors(self) -> Iterable[torch.Tensor]:
        for handler in self._of(_TrainingHandler):
            yield from handler._tensors()
        yield from tensors_of(self._now())

    def _of(self, kind: Type[Handler]) -> List[Handler]:
        return [handler for handler in self._handlers.values() if isinstance(handler, kind)]

    def _takes_newest(self) -> bool:
        """Whether all of it is synchronized here: programs may have classes of their own, which take rank 0's."""
        kinds = (ModelStateHandler, OptimizerStateHandler, LRSchedulerStateHandler, GradScalerStateHandler, SamplerStateHandler)
        ours = all(getattr(type(self), name) is getattr(TorchState, name) for name in ("save", "restore", "sync"))
        return ours and all(type(handler) in kinds for handler in self._handlers.values())

    def _why_steps_are_unknown(self, stepped: Set[torch.Tensor]) -> str:
        """Empty where trained parameters are the models', and those of optimizers that tell when they begin a step."""
        if not self._takes_newest():
            return "it has a save(), restore() or sync() of its own, or a handler of another kind"
        optimizers = self._of(OptimizerStateHandler)
        for optimizer in optimizers:
            if optimizer.is_sharded():
                return "an optimizer of it is sharded"
            if not optimizer.tells_steps():
                return f'the optimizer "{self._name_of(optimizer)}" has no hooks, and does not tell when it makes a step'
        for optimizer in optimizers:
            optimizer.watch()
        models = self._of(ModelStateHandler)
        for model in models:
            model.look()
        of_models = {parameter for model in models for parameter in model.parameters_of_last_look()}
        if not stepped <= of_models:
            optimizer = next(one for one in optimizers if not stepped.intersection(one._parameters()) <= of_models)
            return f'the optimizer "{self._name_of(optimizer)}" has a parameter that no model of the state has'
        if any(parameter.requires_grad for parameter in of_models - stepped):
            return "a model of it trains a parameter that no optimizer of the state has"
        return ""

    def _name_of(self, handler: StateHandler) -> str:
        return next(name for name, other in self._handlers.items() if other is handler)

    def _warn_of_missing_models(self) -> None:
        of_models = {parameter for handler in self._handlers.values() if isinstance(handler.value, torch.nn.Module)
                     for parameter in handler.value.parameters()}
        for optimizer in self._of(OptimizerStateHandler):
            if self._rank() == 0 and not of_models.issuperset(optimizer._parameters()):
                warnings.warn(
                    f'elastic.run(): the optimizer "{self._name_of(optimizer)}" has a parameter that no model of the state has. '
                    "A worker that comes later trains with its own first value of it, and after a loss nothing brings it back: "
                    "give the state the model, as in elastic.TorchState(model=model, optimizer=optimizer)", stacklevel=3)

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
        places = self._agree()
        if not self._keeps_shards():
            self._sync_from(places.index(max(places)))
            return self._steps.note_commit(max(places))
        place, root_rank, self._shards_to_receive = self._copies.agree(
            self._steps.place if self._shards_at == _NO_COPIES else self._shards_at)
        try:
            self._save_without_shards(lambda: self._sync_from(root_rank))
        finally:
            self._shards_to_receive = 0
        self._steps.note_commit(place)
        self._note_copies(place)  # all else of it is here, whatever becomes of them
        self._keep_shards(place)

    def _sync_from(self, root_rank: int) -> None:
        broadcast = self._bcast_object
        is_at_step = self._is_at_step()
        self._newest_rank = root_rank
        self._set_root(root_rank, functools.partial(hvd.broadcast_object, root_rank=root_rank))
        try:
            self._save_received(self._receive_together())
        except Exception:
            if is_at_step:  # for the root it counts as a change, too, that it has given its own
                for handler in self._of(OptimizerStateHandler):
                    handler.note_versions()
            raise
        finally:
            self._set_root(0, broadcast)

    def _agree(self) -> List[int]:
        """Compares what the ranks have, and returns their places."""
        mine = [(name, type(handler).__name__, handler.describe())
                for name, handler in zip(self._handlers, self._of(_StateDictHandler))]
        mine.append(("the names of values", "", sorted(self._saved_state)))
        # Each is sent once: ranks that have tied others would wait for ever.
        mine.append(("the number of tensors of models", "", len(self._tensors_of_models())))
        digest = int.from_bytes(hashlib.blake2b(repr(mine).encode(), digest_size=8).digest(), "little", signed=True)
        rows = hvd.allgather(torch.tensor([[self._steps.place, digest]], device="cpu"), name="sirtaki/elastic place").tolist()
        if any(other != rows[0][1] for _, other in rows):
            of_ranks = hvd.allgather_object(mine, name="sirtaki/elastic states")
            rank = next(rank for rank, other in enumerate(of_ranks) if other != of_ranks[0])
            zero, other = next(pair for pair in itertools.zip_longest(of_ranks[0], of_ranks[rank]) if pair[0] != pair[1])
            differs = hvd.MismatchError(f"the ranks' states differ in their make-up: rank 0 has {zero}, rank {rank} has {other}")
            differs.rank = rank
            raise differs
        return [place for place, _ in rows]

    def _tensors_of_models(self) -> Dict[int, torch.Tensor]:
        return {id(tensor): tensor for model in self._of(ModelStateHandler) for _, tensor in model.named_tensors()}

    def _receive_together(self) -> Dict[str, Any]:
        """The root's bytes, then all tensors: ranks seldom wait for each other."""
        is_root = hvd.rank() == self._root_rank
        self._steps.is_receiving = not is_root
        sharded = self._sharded()
        optimizers = [handler.value for handler in self._of(OptimizerStateHandler) if handler not in sharded]
        others = [handler for handler in self._of(_StateDictHandler) if not isinstance(handler, _TrainingHandler)]
        tensors: List[torch.Tensor] = []

        def give() -> bytes:
            states, tensors[:] = pack_optimizers(optimizers)
            return _dumps((states, [handler.value.state_dict() for handler in others], self._now()))

        data, error = packed(give) if is_root else (b"", None)
        # On the host everywhere, whatever torch's default device is.
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if is_root else nothing
        received = hvd.allgather(sent, name="sirtaki/elastic state")
        # A tensor's own bytes need NumPy, and string_at() takes an int's length.
        data = (ctypes.c_char * received.numel()).from_address(received.data_ptr()).raw
        if error is not None:
            raise error
        saved = unpacked(data)  # raises on all others where the root has raised

        def take() -> Tuple[List[Any], Dict[str, Any]]:
            states, dicts, values = pickle.loads(saved)
            made, tensors[:] = unpack_optimizers(states, optimizers)
            for handler, state_dict in zip(others, dicts):
                handler.value.load_state_dict(state_dict)
            return made, values

        # Where there is no memory for it, say, the others must not wait.
        made, values = agreed(lambda: ([], self._now()) if is_root else take(), name="sirtaki/elastic state is there")
        given = self._tensors_of_models() | {id(tensor): tensor for tensor in tensors}
        handles = [hvd.broadcast_async_(tensor, self._root_rank, name=f"sirtaki/elastic tensor {number}")
                   for number, tensor in enumerate(given.values())]
        for handle in handles:
            hvd.synchronize(handle)
        for optimizer, state in zip(optimizers, made):
            take_state(optimizer, state)
        for handler in sharded if not self._shards_to_receive else ():
            handler.sync()
        self._receive_shards(sharded if self._shards_to_receive else [])
        await_gpus(self._tensors())
        return values

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
