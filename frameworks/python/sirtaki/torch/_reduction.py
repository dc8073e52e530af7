"""What optimizers and modules need for their reducers: the settings, checked, as the library has them."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple, Type, TypeVar

import torch

from sirtaki.torch._hooks import BucketHook, c_hook, compressing_hook
from sirtaki.torch._library import _C
from sirtaki.torch.compression import Compression, Compressor, _number_of
from sirtaki.torch.functions import agreed
from sirtaki.torch.process_sets import ProcessSet, _impl_of
from sirtaki.torch.reductions import Adasum, Average, Sum, op_number

Named = List[Tuple[str, torch.Tensor]]
SHARDS = (None, "optimizer", "gradients")  # in the order of Shard


class Settings:
    """The arguments, from which a reducer is made, and made again."""

    def __init__(
        self,
        named: Named,
        compression: Type[Compressor],
        process_set: ProcessSet,
        hook: Optional[BucketHook],
        **rest: Any,
    ) -> None:
        self.named = named
        self._added: Named = []
        self.compression = compression
        self.process_set = process_set
        self.hook = hook
        self.rest = rest

    @property
    def all_named(self) -> Named:
        return [*self.named, *self._added]

    def name_added(self, groups: List[Dict[str, Any]]) -> Named:
        """Names parameters that have no name by their order in the optimizer, as the library names those that it has got
        since: on a rank that has just come they were all added before. Returns them."""
        known = {id(tensor) for _, tensor in self.named}
        taken = {name for name, _ in self.named}
        added = dict.fromkeys(tensor for group in groups for tensor in group["params"] if id(tensor) not in known)
        free = (name for name in map("added parameter {}".format, itertools.count(1)) if name not in taken)
        self._added = list(zip(free, added))
        return self._added

    def agreed(self) -> _C.ReducerSettings:
        """Collective: what is wrong with them on one rank is told to all."""
        return agreed(self.checked, self.process_set)

    def checked(self) -> _C.ReducerSettings:
        hook = self.hook
        rest = {
            **self.rest,
            "name": self.rest["name"] or "",
            "op": op_number(self.rest["op"]),
            "predivide": float(self.rest["predivide"]),
            "everywhere": bool(self.rest["everywhere"]),
            "sparse_as_dense": bool(self.rest["sparse_as_dense"]),
        }
        wanted = (("backward_passes_per_step", "passes", int), ("check_parameters_every", "check_every", int), ("name", "name", str))
        for argument, key, kind in wanted:
            if not isinstance(rest[key], kind):
                raise ValueError(f"{argument} is {rest[key]!r}; it must be a {'string' if kind is str else 'whole number'}")
        average_at = rest.pop("average_at")
        if average_at not in ("step", "backward"):
            raise ValueError(f"average_at is {average_at!r}; it must be 'step' or 'backward'")
        rest["at_backward"] = average_at == "backward"
        if rest["shard"] not in SHARDS:
            raise ValueError(f"shard is {rest['shard']!r}; it must be None, 'optimizer' or 'gradients'")
        rest["shard"] = SHARDS.index(rest["shard"])
        if rest["shard_over"] not in ("all", "host"):
            raise ValueError(f"shard_over is {rest['shard_over']!r}; it must be 'all' or 'host'")
        rest["over_host"] = rest.pop("shard_over") == "host"
        if hook is not None and not callable(hook):
            raise ValueError(f"communication_hook is {hook!r}; it must be a function")
        if hook is not None and (rest["op"] != Average or self.compression is not Compression.none):
            raise ValueError("a communication hook needs op Average and no compression: the hook does both")
        built_in = _number_of(self.compression)
        if rest["op"] == Adasum and built_in is not None:
            built_in = 0  # what steps change travels as it is
        if built_in is None:
            if rest["op"] not in (Average, Sum):
                raise ValueError("a Compressor of your own needs op Average or Sum")
            hook = compressing_hook(self.compression, self.process_set, rest["op"], rest["predivide"])
            rest.update(op=Average, predivide=1.0)
        return _C.ReducerSettings(
            named=self.all_named,
            compression=built_in or 0,
            process_set=_impl_of(self.process_set),
            hook=None if hook is None else self._weakly(c_hook(hook)),
            **rest,
        )

    def _weakly(self, hook: Callable[[_C.GradientBucket], Any]) -> Callable[[_C.GradientBucket], Any]:
        """A hook may reach its optimizer, in a circle that Python can only take away if the library is not part of it."""
        self._called = hook
        weak = weakref.ref(self)

        def call(bucket: _C.GradientBucket) -> Any:
            settings = weak()
            if settings is None:
                raise RuntimeError("the optimizer or module of this communication hook was deleted")
            return settings._called(bucket)

        return call


Reducer = TypeVar("Reducer")
_made: weakref.WeakSet[Any] = weakref.WeakSet()  # the reducers that Python has not let go yet


def without_garbage(make: Callable[[], Reducer]) -> Reducer:
    """An optimizer that the program has let go may wait for Python to notice (schedulers make cycles), at another time on
    each rank. It is collected first, so that no rank shares its parameters, and their buckets, with one that others lack."""
    if _made:
        gc.collect()
    reducer = make()
    _made.add(reducer)
    return reducer
