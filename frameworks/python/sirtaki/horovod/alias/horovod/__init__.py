"""Horovod's name for Sirtaki: ``horovod.torch`` is sirtaki.torch, ``horovod.common`` is sirtaki.common, with all that is
in them. Only ``python -m sirtaki.horovod`` and ``sirtakirun --as-horovod`` put it on the path."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Optional, Sequence

from sirtaki import run
from sirtaki.horovod import real_horovod, refusal

__version__ = "0.28.1"  # the one whose interface this is
__all__ = ["__version__", "run"]

_place = real_horovod()
if _place is not None:
    raise ImportError(refusal(_place))


class _Same(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Sirtaki's modules by Horovod's names: the modules themselves, so that there is one of each."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        first, _, rest = fullname.partition(".")
        if first != __name__ or rest.split(".")[0] not in ("torch", "common"):
            return None
        if importlib.util.find_spec(f"sirtaki.{rest}") is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module("sirtaki" + spec.name[len(__name__) :])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = getattr(module.__spec__, "loader_state", None)  # the import has put Horovod's there


if not any(type(finder).__name__ == "_Same" and type(finder).__module__ == __name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Same())  # once, also where this module is loaded again
