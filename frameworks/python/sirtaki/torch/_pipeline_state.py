"""The state of an unsplit model, and of its optimizer, is put together of what the ranks of a pipeline have, and taken apart."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import torch

from sirtaki.common.exceptions import InvalidArgumentError, MismatchError
from sirtaki.torch._library import _C
from sirtaki.torch.functions import allgather_object, broadcast_object
from sirtaki.torch.process_sets import ProcessSet, _impl_of

_NAME = "sirtaki/the state of a pipeline, a call of all its ranks"


def _copied(value: Any) -> Any:
    """The same on the CPU; each tensor by itself, since pickle writes all the memory that a view is a part of."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return type(value)((key, _copied(item)) for key, item in value.items())
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _of_ranks(own: Any, process_set: ProcessSet, root_rank: Optional[int]) -> Optional[List[Any]]:
    """What each rank has, on all ranks or on one. The others have that of one rank at a time. Collective."""
    if root_rank is not None and not 0 <= root_rank < _C.size():
        raise InvalidArgumentError(f"root rank {root_rank} is not in the job: its ranks are 0 to {_C.size() - 1}")
    wanted = root_rank in (None, _C.rank())
    kept = []
    for rank in _impl_of(process_set).ranks():
        of_rank = broadcast_object(own, rank, _NAME, process_set)
        if wanted:
            kept.append(of_rank)
    return kept if wanted else None


# ---- the model ----


def merged_states(
    own: Dict[str, Any], names: Sequence[str], process_set: ProcessSet, root_rank: Optional[int]
) -> Optional[Dict[str, Any]]:
    """``names``: of all layers of the model, in their order."""
    parts = _of_ranks((_copied(own), getattr(own, "_metadata", None)), process_set, root_rank)
    if parts is None:
        return None
    place = {name: number for number, name in enumerate(names)}
    whole: Dict[str, Any] = OrderedDict()
    entries = [(key, value) for part, _ in parts for key, value in part.items()]
    whole.update(sorted(entries, key=lambda entry: place[entry[0].split(".")[0]]))
    whole._metadata = OrderedDict()  # type: ignore[attr-defined]  # of what version its modules are
    for _, metadata in parts:
        whole._metadata.update(metadata or {})  # type: ignore[attr-defined]
    return whole


def with_all_tied(state_dict: Mapping[str, Any], ties: Sequence[Sequence[str]]) -> Dict[str, Any]:
    """A state may have a tied parameter once; the unsplit model has it in all places then."""
    whole: Dict[str, Any] = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        whole._metadata = state_dict._metadata  # type: ignore[attr-defined]
    for tie in ties:
        given = next((whole[name] for name in tie if name in whole), None)
        if given is not None:
            whole.update((name, given) for name in tie if name not in whole)
    return whole


def part_of_state(whole: Dict[str, Any], own: Sequence[str], names: Sequence[str]) -> Dict[str, Any]:
    """What belongs to the layers ``own``, and what belongs to no layer of the model, for load_state_dict() to refuse."""
    others = set(names) - set(own)
    part: Dict[str, Any] = OrderedDict((key, value) for key, value in whole.items() if key.split(".")[0] not in others)
    metadata = getattr(whole, "_metadata", None)
    if metadata is not None:
        part._metadata = metadata  # type: ignore[attr-defined]
    return part


# ---- its optimizer ----


class _Groups(NamedTuple):
    """The groups of an optimizer: their options, and the names of their parameters."""

    options: List[Dict[str, Any]]
    names: List[List[str]]


def groups_of(optimizer: torch.optim.Optimizer, names: Dict[torch.Tensor, str]) -> _Groups:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise InvalidArgumentError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the "
                                           "pipeline's")
            if _C.split_set_of(parameter) is not None:
                raise InvalidArgumentError(f"{names[parameter]!r} is a part of a parameter that is split over ranks, whose state is "
                                           "of that part; save the optimizer's own state_dict() on each rank")
    options = [{key: value for key, value in group.items() if key not in ("params", "param_names")}
               for group in optimizer.param_groups]
    return _Groups(options, [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups])


class WholeGroups:
    """The groups of the unsplit model's optimizer, if it has those of the stages' optimizers. Parameters are numbered as it
    would number them; one that is tied has one number."""

    def __init__(self, groups: _Groups, model: Sequence[str], layers: Sequence[str], ties: Sequence[Sequence[str]],
                 process_set: ProcessSet) -> None:
        """``model``: the names of this rank's parameters, in their order. Collective."""
        told: List[Tuple[_Groups, List[str]]] = allgather_object((groups, list(model)), _NAME, process_set)
        ranks = _impl_of(process_set).ranks()
        for rank, (of_rank, _) in zip(ranks, told):
            if of_rank.options != told[0][0].options:
                raise MismatchError(f"the optimizers of the stages have other groups or options: {told[0][0].options} on rank "
                                    f"{ranks[0]}, {of_rank.options} on rank {rank}")
        self.options = groups.options
        place = {name: number for number, name in enumerate(layers)}
        order = sorted((name for _, names in told for name in names), key=lambda name: place[name.split(".")[0]])
        # The name by which the model has a tied parameter: that of its first layer, and within a layer the one that its rank
        # has told.
        known = set(order)
        self.first = {other: min(known.intersection(tie) or tie, key=lambda name: place[name.split(".")[0]])
                      for tie in ties for other in tie}
        self.numbers: Dict[str, int] = {}
        self.members: List[List[int]] = []
        for number in range(len(groups.options)):
            in_group = {name for of_rank, _ in told for name in of_rank.names[number]}
            kept = [name for name in order if name in in_group and self.first.get(name, name) == name]
            self.members.append(list(range(len(self.numbers), len(self.numbers) + len(kept))))
            self.numbers.update((name, len(self.numbers)) for name in kept)

    def number(self, name: str) -> int:
        return self.numbers[self.first.get(name, name)]


def merged_optimizer_states(
    own: Dict[str, Any], groups: _Groups, whole: WholeGroups, process_set: ProcessSet, root_rank: Optional[int]
) -> Optional[Dict[str, Any]]:
    names = [name for group in groups.names for name in group]
    by_number = {whole.number(names[number]): _copied(state) for number, state in own["state"].items()}
    parts = _of_ranks(by_number, process_set, root_rank)
    if parts is None:
        return None
    state = {number: of_parameter for part in parts for number, of_parameter in part.items()}
    return {"state": dict(sorted(state.items())),
            "param_groups": [{**options, "params": members} for options, members in zip(whole.options, whole.members)]}


def part_of_optimizer_state(state_dict: Dict[str, Any], groups: _Groups, whole: WholeGroups) -> Dict[str, Any]:
    """What optimizer.load_state_dict() takes on this rank."""
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    wanted = [len(members) for members in whole.members]
    if sizes != wanted:
        raise InvalidArgumentError(f"the state is of an optimizer with {sizes} parameters in its groups; the model's has "
                                   f"{wanted}")
    state: Dict[int, Any] = {}
    used: Set[int] = set()
    param_groups: List[Dict[str, Any]] = []
    for saved, names in zip(state_dict["param_groups"], groups.names):
        begin = sum(len(group["params"]) for group in param_groups)
        numbers = range(begin, begin + len(names))
        options = {key: value for key, value in saved.items() if key != "param_names"}
        param_groups.append({**options, "params": list(numbers)})
        for number, name in zip(numbers, names):
            if whole.number(name) in state_dict["state"]:
                of_parameter = state_dict["state"][whole.number(name)]
                # Tied parameters on one rank have states of their own.
                state[number] = copy.deepcopy(of_parameter) if whole.number(name) in used else of_parameter
                used.add(whole.number(name))
    return {"state": state, "param_groups": param_groups}
