"""Scripts that import Horovod run as they are: ``python -m sirtaki.horovod train.py`` and ``sirtakirun --as-horovod``."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from typing import Optional

# It has a package named horovod, which is Sirtaki; whoever has the folder on the path can import it, and nobody else.
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "alias")


def real_horovod() -> Optional[str]:
    """Returns where a Horovod is installed; None if there is none. Folders that merely have its name do not count."""
    own = os.path.realpath(FOLDER)
    elsewhere = [folder for folder in sys.path if os.path.realpath(folder) != own]
    for finder in sys.meta_path:  # an editable package may have one of its own
        path = elsewhere if finder is importlib.machinery.PathFinder else None
        found = finder.find_spec("horovod", path) if hasattr(finder, "find_spec") else None
        if found is not None and found.origin and not os.path.realpath(found.origin).startswith(own + os.sep):
            return found.origin
    return None


def refusal(place: str) -> str:
    return (
        f"Horovod itself is installed ({place}), and Sirtaki does not take its place: uninstall it (pip uninstall "
        "horovod), or run without sirtaki.horovod or --as-horovod"
    )
