"""These functions have the names and arguments of Horovod's module. They say what this build has, and help a little."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any, Callable, Iterator, List, Optional, Sequence

from torch.torch_version import TorchVersion

from sirtaki.torch import session
from sirtaki.torch.session import (
    ccl_built, check_extension, ddl_built, gloo_built, gpu_available, mpi_built, num_rank_is_power_2,
)

__all__ = [
    "ccl_built", "check_extension", "ddl_built", "env", "extension_available", "get_average_backwards_compatibility_fun",
    "gloo_built", "gpu_available", "is_iterable", "is_version_greater_equal_than", "mpi_built", "nccl_built",
    "num_rank_is_power_2", "split_list",
]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether there is a module for the framework: for "torch" alone."""
    return ext_base_name == "torch"


def nccl_built(verbose: bool = False) -> bool:
    return bool(session.nccl_built())


@contextlib.contextmanager
def env(**values: Optional[str]) -> Iterator[None]:
    """Within this context the environment has these variables. Those that are None stay as they are."""
    given = {name: value for name, value in values.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, Optional[bool]], Any]:
    """Returns a function of ``op`` and the older argument ``average``, of which at most one is given, that returns the
    operation of ``reduce_ops`` that they mean."""

    def op_of(op: Any, average: Optional[bool]) -> Any:
        if average is None:
            return reduce_ops.Average if op is None else op
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=2)
        return reduce_ops.Average if average else reduce_ops.Sum

    return op_of


def split_list(items: Sequence[Any], parts: int) -> List[Sequence[Any]]:
    """Returns the items in that many lists, whose lengths differ by at most 1; the longer ones come first."""
    length, longer = divmod(len(items), parts)
    ends = [length * part + min(part, longer) for part in range(parts + 1)]
    return [items[begin:end] for begin, end in zip(ends, ends[1:])]


def is_iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compares two versions in the order of Python's packages, where 2.1.0a0 is before 2.1.0; ``target`` is of the form
    "a.b.c"."""
    if not isinstance(ver, str) or not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(f"the versions are {ver!r} and {target!r}; they must be strings, the second as \"1.2.3\"")
    return TorchVersion(ver) >= TorchVersion(target)
