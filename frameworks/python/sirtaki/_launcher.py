"""This module knows where sirtakirun is, and is the commands that an installed package puts on PATH."""

from __future__ import annotations

import os
import shutil
import sys


def _installed(program: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", program)


def launcher_path() -> str:
    """Returns the path of ``sirtakirun``: that of the installed package, of the build folder, or on PATH.

    Raises FileNotFoundError if there is none.
    """
    from sirtaki import _build

    for path in (_installed("sirtakirun"), _build.launcher):
        if path and os.access(path, os.X_OK):
            return path
    found = shutil.which("sirtakirun")
    if found is None:
        raise FileNotFoundError("sirtakirun was not built with this package, and is not on PATH")
    return found


def main() -> None:
    path = launcher_path()
    os.execv(path, [path, *sys.argv[1:]])


def checkpoint_main() -> None:
    path = _installed("sirtaki-checkpoint")
    os.execv(path, [path, *sys.argv[1:]])
