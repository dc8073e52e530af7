"""The shards of an optimizer: what is in the place of its parameters during a step, and the state for it."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

from sirtaki.common.exceptions import InvalidArgumentError, MismatchError
from sirtaki.torch.functions import allgather_object, broadcast_object
from sirtaki.torch.process_sets import ProcessSet, _impl_of, local_process_set

_BY_ELEMENT = {
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
}
# The parameter, this rank's shard of it, its first element, and whether its gradient was averaged and is kept in shards.
Shard = Tuple[torch.Tensor, Optional[torch.Tensor], int, bool]
_OTHER_RANKS = (
    "consolidated_state_dict(), which all ranks call, makes a state that load_state_dict() takes on any number of ranks"
)


def by_element(optimizer: torch.optim.Optimizer, shard: Optional[str]) -> bool:
    """Whether the optimizer may get a part of each parameter. One of the program's own gets whole ones."""
    if shard is not None and isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS looks at all parameters at once, so its state cannot be sharded: leave out shard")
    return type(optimizer) in _BY_ELEMENT


def is_cut(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this rank has the optimizer's state for its shards only."""
    shards = getattr(optimizer, "_sirtaki_shards", None)
    return shards is not None and shards.cut is optimizer.state


def steps_of(optimizer: torch.optim.Optimizer) -> Optional[int]:
    """How many steps the state of shards has seen since it was whole; None if it is whole."""
    return optimizer._sirtaki_shards.steps if is_cut(optimizer) else None  # type: ignore[attr-defined]


def shard_set(optimizer: Any) -> ProcessSet:
    """The ranks that have the shards of everything together; those of other hosts have the same with shard_over="host"."""
    return local_process_set() if optimizer._sirtaki_settings.rest["shard_over"] == "host" else optimizer.process_set


def parameters_of(optimizer: torch.optim.Optimizer) -> List[torch.Tensor]:
    """In the order in which state_dict() numbers them."""
    return list(dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"]))


class Shards:
    """Belongs to one optimizer, and to the one that it was made of. What is loaded takes the place of the dictionary of
    state, and is whole."""

    def __init__(self) -> None:
        self.cut: Any = None  # the dictionary that has the state of shards
        self.mine: Dict[torch.Tensor, Tuple[torch.Tensor, int]] = {}  # by parameter; as Shard
        self.order: Dict[torch.Tensor, None] = {}  # parameters, as they would have got state without shards
        self.steps = 0  # since the state was whole: the same number on all ranks, or their shards do not go together
        self.run: Optional[str] = None  # of all ranks' optimizers that were set up, or loaded, together: no others have it
        self.in_step = False

    def check_whole(self, optimizer: torch.optim.Optimizer, what: str) -> None:
        if is_cut(optimizer):
            raise InvalidArgumentError(
                f"a sharded optimizer cannot be {what} after its first step: this rank has the state of its shards "
                "only. consolidated_state_dict(), which all ranks call, makes the whole state, on all of them or on one; "
                "shard_state_dict() gives what this rank has"
            )

    def check_not_in_step(self, call: str) -> None:
        if self.in_step:
            raise InvalidArgumentError(
                f"{call} was called within the step of a sharded optimizer, by a hook of it perhaps, which sees this "
                "rank's shards: call it before or after step()"
            )

    @contextlib.contextmanager
    def in_place(self, optimizer: torch.optim.Optimizer, shards: Optional[List[Shard]]) -> Iterator[None]:
        """Within this context, which is a step's, the optimizer has these in the place of its parameters."""
        if shards is None:
            yield
            return
        parameters = parameters_of(optimizer)
        if not is_cut(optimizer):
            self.order = dict.fromkeys(key for key in optimizer.state if isinstance(key, torch.Tensor))
            self.steps = 0
        averaged = {parameter for parameter, _, _, has_average in shards if has_average}
        self.order.update(dict.fromkeys(p for p in parameters if p.grad is not None or p in averaged))
        self.steps += 1
        self.mine = _by_parameter(shards)
        self.cut = optimizer.state
        for parameter in parameters:
            _cut_state(optimizer.state, parameter, *self.mine.get(parameter, (None, 0)))
        with _in_groups(optimizer, self.mine):
            self.in_step = True
            try:
                yield
            finally:
                self.in_step = False

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets the state of shards go: those of a new reducer are others."""
        if is_cut(optimizer):
            optimizer.state.clear()
            self.cut, self.mine = None, {}

    def follow(self, optimizer: Any, reducer: Any) -> None:
        """Gives the state to the shards of a new reducer, which are those of the last one if the ranks are the same."""
        if not is_cut(optimizer):
            return
        new = _by_parameter(reducer.shards(optimizer.param_groups) or [])
        state = optimizer.state
        for parameter, (shard, begin) in self.mine.items():
            found, at = new.get(parameter, (None, 0))
            if shard in state and (found is None or (at, found.numel()) != (begin, shard.numel())):
                raise InvalidArgumentError(
                    "a sharded optimizer cannot be set up again with other ranks, or without parameters that it had: this "
                    f"rank has the state of other shards. Before that, {_OTHER_RANKS}"
                )
        for parameter, (shard, _) in self.mine.items():
            if shard in state:
                state[new[parameter][0]] = state.pop(shard)
        self.mine = new

    # ---- the state of this rank's shards: shard_state_dict() ----

    def saved(self, optimizer: Any, state_dict: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
        """``state_dict``: the optimizer's own. The whole state where it is not cut, or no step was made."""
        rank, ranks = _seat(shard_set(optimizer))
        made: Dict[str, Any] = {"rank": rank, "ranks": ranks, "steps": None, "run": None, "order": None, "shards": None}
        if not is_cut(optimizer):
            return {**made, "optimizer": state_dict()}
        places = {parameter: place for place, parameter in enumerate(parameters_of(optimizer))}
        mine = _by_parameter(optimizer._sirtaki_reducer.shards(optimizer.param_groups))
        made.update(steps=self.steps, run=self.run, order=[places[parameter] for parameter in self.order if parameter in places])
        with _in_groups(optimizer, mine):
            return {**made, "shards": _table(optimizer, list(places), mine), "optimizer": state_dict()}

    def check(self, optimizer: Any, saved: Any) -> Any:
        """Returns the shards that the state is of, if they are this rank's; None if the state is whole."""
        if not isinstance(saved, dict) or not {"rank", "ranks", "steps", "order", "shards", "optimizer"} <= saved.keys():
            raise InvalidArgumentError(
                "load_shard_state_dict() takes what shard_state_dict() has returned; load_state_dict() takes a whole state"
            )
        rank, ranks = _seat(shard_set(optimizer))
        if (saved["rank"], saved["ranks"]) != (rank, ranks):
            raise InvalidArgumentError(
                f"this is rank {rank} of {ranks}, and the state is of the shards of rank {saved['rank']} of {saved['ranks']}: "
                f"each rank loads what it has saved, with as many ranks. In their place {_OTHER_RANKS}"
            )
        if saved["shards"] is None:
            return None
        shards = optimizer._sirtaki_reducer.shards(optimizer.param_groups)
        if shards is None:
            raise InvalidArgumentError('the state is of shards, and this optimizer has none: give it shard="optimizer"')
        mine = _by_parameter(shards)
        table = _table(optimizer, parameters_of(optimizer), mine)
        for found, wanted in zip(saved["shards"] + [("nothing", 0, 0, 0)], table + [("nothing", 0, 0, 0)]):
            if tuple(found) != wanted:
                raise InvalidArgumentError(
                    f"the state is of other shards: it has elements {found[2]} to {found[3]} of {found[0]} ({found[1]} elements) "
                    f"where this optimizer has elements {wanted[2]} to {wanted[3]} of {wanted[0]} ({wanted[1]} elements). Make "
                    f"the optimizer as it was when it was saved; or {_OTHER_RANKS}"
                )
        return mine

    def load(self, optimizer: Any, saved: Dict[str, Any], load_state_dict: Callable[[Dict[str, Any]], None]) -> None:
        """Not collective."""
        mine = self.check(optimizer, saved)
        if mine is None:
            return load_state_dict(saved["optimizer"])
        with _in_groups(optimizer, mine):
            load_state_dict(saved["optimizer"])
        parameters = parameters_of(optimizer)
        self.cut, self.mine, self.steps = optimizer.state, mine, saved["steps"]
        self.order = dict.fromkeys(parameters[place] for place in saved["order"])


class ReceivedShards:
    """Makes this rank's shards of those that all ranks of an earlier generation had: add() is called for each of these."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._parameters = parameters_of(optimizer)
        shards = optimizer._sirtaki_reducer.shards(optimizer.param_groups)
        self._is_alone = shards is None  # and has everything
        self._mine = ({parameter: (parameter, 0) for parameter in self._parameters} if shards is None
                      else _by_parameter(shards))
        self._state: Dict[torch.Tensor, Dict[Any, Any]] = {}
        self._saved: Any = None

    def add(self, saved: Dict[str, Any]) -> None:
        """``saved``: what shard_state_dict() has returned on one of the ranks."""
        if [line[:2] for line in saved["shards"]] != [line[:2] for line in _table(self._optimizer, self._parameters, {})]:
            raise InvalidArgumentError("the optimizer has other parameters than when its shards were kept: a rank that comes "
                                       "has those that the program gives it before run()")
        self._saved = self._saved or saved
        state = saved["optimizer"]["state"]
        # The optimizer has numbered what this rank had: a parameter without elements is there on all.
        held = [place for place, (_, elements, begin, end) in enumerate(saved["shards"]) if end > begin or elements == 0]
        for number, place in enumerate(held):
            if number in state:
                self._take(self._parameters[place], state[number], *saved["shards"][place][2:])

    def _take(self, parameter: torch.Tensor, state: Dict[Any, Any], begin: int, end: int) -> None:
        shard, first = self._mine.get(parameter, (None, 0))
        if shard is None:
            return
        at, to = max(begin, first), min(end, first + shard.numel())
        if at >= to and parameter.numel() > 0:
            return
        is_new = parameter not in self._state
        made = self._state.setdefault(parameter, {})
        shape = parameter.shape if end - begin == parameter.numel() else (end - begin,)
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape != shape:
                if is_new:
                    made[key] = value
                continue
            part = _flat(value, parameter) if value.shape == parameter.shape else value
            if is_new:
                made[key] = (torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device)
                             if shard is parameter else torch.empty(shard.numel(), dtype=value.dtype, device=value.device))
            whole = _flat(made[key], parameter) if shard is parameter else made[key]
            whole[at - first:to - first].copy_(part[at - begin:to - begin])

    def load(self) -> None:
        """Gives the optimizer what was made. Not collective."""
        optimizer = self._optimizer
        parameters = [parameter for parameter in self._parameters if parameter in self._mine]
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        groups = [{**saved, "params": [numbers[parameter] for parameter in group["params"] if parameter in numbers]}
                  for saved, group in zip(self._saved["optimizer"]["param_groups"], optimizer.param_groups)]
        state = {numbers[parameter]: made for parameter, made in self._state.items()}
        rank, ranks = _seat(shard_set(optimizer))
        table = None if self._is_alone else _table(optimizer, self._parameters, self._mine)
        optimizer._sirtaki_load_shards({**self._saved, "rank": rank, "ranks": ranks, "shards": table,
                                        "optimizer": {"state": state, "param_groups": groups}})


def _seat(process_set: ProcessSet) -> Tuple[int, int]:
    """This rank's place among those that have shards, and how many they are. Outside the set a rank has none, and is alone."""
    impl = _impl_of(process_set)
    return (impl.rank(), impl.size()) if impl.included() else (0, 1)


def new_run(process_set: ProcessSet) -> Optional[str]:
    """Returns a number that no other run has, the same on all ranks. Collective."""
    impl = _impl_of(process_set)
    if not impl.included():
        return None
    name = "sirtaki/the number of a run of a sharded optimizer"
    return broadcast_object(secrets.token_hex(8), impl.ranks()[0], name, process_set)  # type: ignore[no-any-return]


def _differing(own: Any, name: str, process_set: ProcessSet, none: str, but_first: bool = False) -> str:
    """Says what each rank of the set has, if that is not the same; ``but_first``: nor nothing on the first. Collective."""
    impl = _impl_of(process_set)
    of_ranks = allgather_object(own, name, process_set) if impl.included() else []
    if len(set(of_ranks)) <= 1 or (but_first and of_ranks[0] is None):
        return ""
    return ", ".join(f"rank {rank}: {none if of is None else of}" for rank, of in zip(impl.ranks(), of_ranks))


def check_run(run: Optional[str], process_set: ProcessSet) -> None:
    """Raises on all ranks if the shards that they load are of different runs. Files of before there were numbers have none.
    Collective."""
    have = _differing(run, "sirtaki/the check of the shards' run", process_set, "none")
    if not have:
        return
    raise MismatchError(
        f"the ranks load optimizer state of different runs, which does not go together (the runs' numbers: {have}): give each "
        "rank the file that it has written in the same run, at the same step"
    )


def check_steps(steps: Any, process_set: ProcessSet, whole_is_given: bool = False) -> None:
    """Raises on all ranks if their shards are of different steps. ``steps``: None with whole state, which ``whole_is_given``
    says that the first rank gives to all if it has some. Collective."""
    have = _differing(steps, "sirtaki/the check of the shards", process_set, "whole", whole_is_given)
    if not have:
        return
    raise MismatchError(
        f"the ranks have optimizer state of different steps, which does not go together ({have}): give all ranks that of one "
        "step, or load_state_dict() what consolidated_state_dict() has made"
    )


def _by_parameter(shards: List[Shard]) -> Dict[torch.Tensor, Tuple[torch.Tensor, int]]:
    return {parameter: (shard, begin) for parameter, shard, begin, _ in shards if shard is not None}


def _table(optimizer: Any, parameters: List[torch.Tensor], mine: Dict[torch.Tensor, Tuple[torch.Tensor, int]]) -> List[Any]:
    """For each parameter its name, its elements, and those from which on and up to which this rank has them. Shards are of
    elements as these lie in memory: the name tells of an order that is not the usual one."""
    names = optimizer._parameter_names
    table = []
    for place, parameter in enumerate(parameters):
        shard, begin = mine.get(parameter, (None, 0))
        end = begin + (0 if shard is None else shard.numel())
        name = names.get(parameter, f"parameter {place}")
        if not parameter.is_contiguous():
            name += f" with the strides {parameter.stride()}"
        table.append((name, parameter.numel(), begin, end))
    return table


@contextlib.contextmanager
def _in_groups(optimizer: torch.optim.Optimizer, mine: Dict[torch.Tensor, Tuple[torch.Tensor, int]]) -> Iterator[None]:
    """Within this context the groups have these in the place of the parameters."""
    whole = [group["params"] for group in optimizer.param_groups]
    for group, params in zip(optimizer.param_groups, whole):
        group["params"] = [mine[parameter][0] for parameter in params if parameter in mine]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, whole):  # they may be others: load_state_dict() makes new ones
            group["params"] = params


def _cut_state(state: Any, parameter: torch.Tensor, shard: Optional[torch.Tensor], begin: int) -> None:
    """What belongs to the whole parameter becomes what belongs to the shard; of others' shards it is let go."""
    if shard is parameter or parameter not in state:
        return
    whole = state.pop(parameter)
    if shard is not None:
        state[shard] = {key: _part(value, parameter, begin, shard.numel()) for key, value in whole.items()}


def _part(value: Any, parameter: torch.Tensor, begin: int, count: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.dim() == 0:
        return value
    return _flat(value, parameter).narrow(0, begin, count).clone()


def _flat(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which the parameter's lie in memory; without a copy if they lie so."""
    if value.stride() != parameter.stride():
        value = torch.empty_strided(value.shape, parameter.stride(), dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((value.numel(),), (1,))
