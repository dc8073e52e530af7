"""The whole state of a sharded optimizer, made of what each rank has: consolidated_state_dict()."""

from __future__ import annotations

import collections
import copy
import io
import pickle
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from sirtaki.common.exceptions import InvalidArgumentError, MismatchError
from sirtaki.torch._library import _C
from sirtaki.torch._shards import is_cut, parameters_of, shard_set
from sirtaki.torch._structures import dense_strides, moved
from sirtaki.torch.functions import agreed, allgather_pickled
from sirtaki.torch.process_sets import ProcessSet, _impl_of

# In its first call a rank that comes alone waits, and is told by this name what for.
_NAME = "sirtaki/consolidated_state_dict() of an optimizer, a call of all its ranks"
# Small tensors are under way together, as each would take as long as the ranks take to agree on it. Larger ones are alone.
_TOGETHER, _TOGETHER_BYTES = 128, 16 << 20


class _Kind(NamedTuple):
    """What the ranks know of a tensor that travels."""

    dtype: torch.dtype
    on_cpu: bool
    is_part: bool  # of one like the parameter
    elements: int  # else


class _Held(NamedTuple):
    """What a rank has of a parameter's state, as it tells the others: all but the tensors."""

    place: int  # the parameter's; -1: state that belongs to no parameter
    begin: int
    count: int
    keys: List[Any]
    kinds: List[_Kind]
    data: bytes


class _Told(NamedTuple):
    asks: Tuple[Any, ...]  # is the same on all ranks
    order: List[int]
    held: List[_Held]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """As they lie in memory; without a copy if the tensor lies dense."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    strides = dense_strides(tensor)
    if tensor.stride() != strides:
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Puts tensors aside, which travel by themselves, except those of one element."""

    def __init__(self, file: io.BytesIO, places: Dict[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = places
        self._numbers: Dict[int, int] = {}
        self.aside: List[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) in self._places:
            return ("parameter", self._places[id(obj)])
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.is_quantized:
            return None
        what = (obj.dtype, tuple(obj.shape), dense_strides(obj), obj.device.type == "cpu")
        if obj.numel() == 1:
            return ("small", bytes(_bytes_of(obj).tolist()), *what)
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.aside)
            self.aside.append(obj)
        return ("tensor", self._numbers[id(obj)], *what)


def _device(held: _Held, on_cpu: bool, parameters: Sequence[torch.Tensor]) -> torch.device:
    of = [parameters[held.place]] if held.place >= 0 else parameters
    return torch.device("cpu") if on_cpu else next((p.device for p in of if p.device.type != "cpu"), torch.device("cuda"))


class _Unpickler(pickle.Unpickler):
    """Calls ``receive()`` for the bytes of each tensor that was put aside, in their order."""

    def __init__(self, held: _Held, receive: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor],
                 to: Optional[torch.device]) -> None:
        super().__init__(io.BytesIO(held.data))
        self._held, self._receive, self._parameters, self._to = held, receive, parameters, to
        self._received: Dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "parameter":
            return self._parameters[pid[1]]
        kind, number, dtype, shape, strides, on_cpu = pid
        if kind == "small":
            data = torch.tensor(list(number), dtype=torch.uint8, device="cpu")
            return data.view(dtype).as_strided(shape, strides).to(self._to or _device(self._held, on_cpu, self._parameters))
        if number not in self._received:
            data = self._receive()
            if self._held.kinds[number].is_part:
                shape, strides = self._parameters[self._held.place].shape, self._parameters[self._held.place].stride()
            data = data.view(dtype).as_strided(shape, strides)
            self._received[number] = data if self._to is None else data.to(self._to)
        return self._received[number]


class _Consolidation:
    def __init__(self, optimizer: Any, root_rank: Optional[int], to: Optional[torch.device]) -> None:
        self.optimizer, self.root_rank, self.to = optimizer, root_rank, to
        self.set = _impl_of(optimizer.process_set)
        self.ranks = self.set.ranks()
        self.parameters = parameters_of(optimizer)
        self.places = {parameter: place for place, parameter in enumerate(self.parameters)}
        self.place_of_id = {id(parameter): place for parameter, place in self.places.items()}
        self.aside: Dict[int, List[torch.Tensor]] = {}  # this rank's, by place
        self.of_ranks: List[_Told] = []

    @property
    def wanted(self) -> bool:
        return self.root_rank in (None, _C.rank())

    def tell(self) -> None:
        """Every rank gets to know what all have, and all raise if that does not fit together."""
        self.of_ranks = allgather_pickled(
            lambda: pickle.dumps(self._told(), protocol=pickle.HIGHEST_PROTOCOL), _NAME, self.set)
        for rank, told in zip(self.ranks, self.of_ranks):
            if told.asks != self.of_ranks[0].asks:
                raise MismatchError(
                    f"consolidated_state_dict(): rank {self.ranks[0]} comes with {_text_of(self.of_ranks[0].asks)}, and "
                    f"rank {rank} with {_text_of(told.asks)}"
                )

    def _told(self) -> _Told:
        shards = self.optimizer._sirtaki_shards
        asks = (self.root_rank, is_cut(self.optimizer), len(self.parameters))
        if not asks[1]:
            return _Told(asks, [], [])
        state, held = self.optimizer.state, []
        is_first = _impl_of(shard_set(self.optimizer)).ranks()[0] == self.ranks[0]  # others have what these have
        for place, parameter in enumerate(self.parameters if is_first else ()):
            shard, begin = shards.mine.get(parameter, (parameter, 0))
            if shard in state:
                held.append(self._described(state[shard], place, begin, shard))
        others = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        if others and _C.rank() == self.ranks[0]:
            held.append(self._described(others, -1, 0, None))
        order = [self.places[parameter] for parameter in shards.order if parameter in self.places]
        return _Told(asks, [-1, *order] if next(iter(state), None) in others else order, held)

    def _described(self, state: Any, place: int, begin: int, shard: Optional[torch.Tensor]) -> _Held:
        file = io.BytesIO()
        pickler = _Pickler(file, self.place_of_id)
        pickler.dump(state)
        self.aside[place] = pickler.aside
        is_part = shard is not None and shard is not self.parameters[place]
        count = shard.numel() if shard is not None else 0
        kinds = []
        for tensor in pickler.aside:
            like = is_part and tensor.shape == (count,)
            kinds.append(_Kind(tensor.dtype, tensor.device.type == "cpu", like, 0 if like else tensor.numel()))
        return _Held(place, begin, count, list(state) if is_part else [], kinds, file.getvalue())

    def whole_state(self) -> Any:
        """The state by whole parameters, in the order in which they would have got it, where it is wanted."""
        holders: Dict[int, List[Tuple[int, _Held]]] = {place: [] for told in self.of_ranks[:1] for place in told.order}
        for rank, told in zip(self.ranks, self.of_ranks):
            for held in told.held:
                holders.setdefault(held.place, []).append((rank, held))
        for place, of_place in holders.items():
            self._check(place, of_place)
        state: Any = collections.defaultdict(dict)
        tensors = self._tensors([of_place for of_place in holders.values() if of_place])
        try:
            for place, of_place in holders.items() if self.wanted else ():
                if of_place:
                    made = _Unpickler(of_place[0][1], tensors.__next__, self.parameters, self.to).load()
                    state.update(made if place < 0 else {self.parameters[place]: made})
        finally:
            collections.deque(tensors, maxlen=0)  # what others want, also if what came could not be put together
        return state

    def _tensors(self, holders: List[List[Tuple[int, _Held]]]) -> Iterator[torch.Tensor]:
        """Their bytes, in the order in which they were put aside; none where they are not wanted."""
        under_way: List[_C.Handle] = []
        size = 0
        for of_place in holders:
            owner, first = of_place[0]
            for number, kind in enumerate(first.kinds):
                elements = self.parameters[first.place].numel() if kind.is_part else kind.elements
                if len(under_way) == _TOGETHER or (under_way and size + elements * kind.dtype.itemsize > _TOGETHER_BYTES):
                    yield from self._ended(under_way)
                    size = 0
                size += elements * kind.dtype.itemsize
                if _C.rank() in ([rank for rank, _ in of_place] if kind.is_part else [owner]):
                    mine = _bytes_of(self.aside[first.place][number])
                else:
                    mine = torch.empty(0, dtype=torch.uint8, device=_device(first, kind.on_cpu, self.parameters))
                under_way.append(self._start(mine, f"{_NAME}, {len(under_way)}"))
        yield from self._ended(under_way)

    def _start(self, mine: torch.Tensor, name: str) -> _C.Handle:
        if self.root_rank is None:
            return _C.allgather_async(mine, name, self.set)
        splits = [mine.numel() if rank == self.root_rank else 0 for rank in self.ranks]
        return _C.alltoall_async(mine, splits, name, self.set)

    def _ended(self, under_way: List[_C.Handle]) -> Iterator[torch.Tensor]:
        while under_way:
            received = under_way.pop(0).wait()
            yield received if self.root_rank is None else received[0]
            del received  # the next one may need its place

    def _check(self, place: int, holders: List[Tuple[int, _Held]]) -> None:
        if place < 0 or not holders:
            return
        elements, first = self.parameters[place].numel(), holders[0][1]
        if all(held.count == elements for _, held in holders):
            return
        end = 0
        for _, held in holders:
            if held.begin != end or (held.keys, held.kinds) != (first.keys, first.kinds):
                break
            end += held.count
        if end == elements:
            return
        have = "; ".join(
            f"rank {rank} {held.keys} of elements {held.begin} to {held.begin + held.count}" for rank, held in holders)
        raise MismatchError(
            f"consolidated_state_dict(): the ranks' state of the optimizer's parameter {place}, which has {elements} elements, "
            f"does not fit together: {have}"
        )


def _text_of(asks: Tuple[Any, ...]) -> str:
    root_rank, cut, parameters = asks
    return f"root_rank={root_rank}, {parameters} parameters and the state of {'shards' if cut else 'whole parameters'}"


def _checked(root_rank: Any, device: Any, process_set: ProcessSet) -> Optional[torch.device]:
    ranks = _impl_of(process_set).ranks()
    if root_rank is not None and (not isinstance(root_rank, int) or root_rank not in ranks):
        raise InvalidArgumentError(
            f"consolidated_state_dict(): root_rank is {root_rank!r}; it must be None or a rank of the optimizer's: {ranks}"
        )
    return None if device is None else torch.device(device)


def consolidated(
    optimizer: Any, root_rank: Optional[int], device: Any, state_dict: Callable[[], Dict[str, Any]]
) -> Optional[Dict[str, Any]]:
    """``state_dict``: the optimizer's own, which gives what there is in ``optimizer.state``."""
    to = agreed(lambda: _checked(root_rank, device, optimizer.process_set), optimizer.process_set, _NAME)
    is_outside = optimizer.process_set.included() is False
    with torch.no_grad():
        whole = _Consolidation(optimizer, root_rank, to)
        if not is_outside:
            whole.tell()
        if not is_cut(optimizer):
            if not whole.wanted:
                return None
            made = copy.deepcopy(state_dict(), {id(parameter): parameter for parameter in whole.parameters})
            return made if to is None else moved(made, to)
        mine, optimizer.state = optimizer.state, whole.whole_state()
        try:
            if not whole.wanted:
                return None
            made = state_dict()
            made["param_groups"] = copy.deepcopy(made["param_groups"])  # a learning rate may be a tensor
            return made
        finally:
            optimizer.state = mine
