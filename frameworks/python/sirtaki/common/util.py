"""These functions have the names and arguments of Horovod's module. They say what this build has, and help a little."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Any, Iterator, List, Optional, Sequence

from sirtaki.torch import session
from sirtaki.torch.session import check_extension, gpu_available, num_rank_is_power_2

__all__ = [
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether there is a module for the framework: for "torch" alone."""
    return ext_base_name == "torch"


def mpi_built(verbose: bool = False) -> bool:
    return session.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    return session.gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    return bool(session.nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    return session.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    return session.ccl_built()


@contextlib.contextmanager
def env(**values: Optional[str]) -> Iterator[None]:
    """Within this context the environment has these variables, and has not those that are None."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Any) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def split_list(items: Sequence[Any], parts: int) -> List[Sequence[Any]]:
    """Returns the items in so many lists, whose lengths differ by at most 1; the longer ones come first."""
    length, longer = divmod(len(items), parts)
    ends = [length * part + min(part, longer) for part in range(parts + 1)]
    return [items[begin:end] for begin, end in zip(ends, ends[1:])]


def is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compares the numbers of two versions; ``target`` is of the form "a.b.c"."""
    if not isinstance(ver, str) or not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(f"the versions are {ver!r} and {target!r}; they must be strings, the second as \"1.2.3\"")
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> List[int]:
    found = [int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3]]
    return found + [0] * (3 - len(found))
