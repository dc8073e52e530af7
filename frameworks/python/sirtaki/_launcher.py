"""This module knows where the package's programs and files are, and is the commands that it puts on PATH."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from typing import NoReturn


def _installed(*names: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), *names)


def cmake_prefix_path() -> str:
    """Returns the folder for CMAKE_PREFIX_PATH, in which find_package(Sirtaki) finds the C++ library of this package.

    Raises FileNotFoundError in a build folder.
    """
    folder = _installed()
    if not os.path.exists(os.path.join(folder, "lib", "cmake", "Sirtaki", "SirtakiConfig.cmake")):
        raise FileNotFoundError("this sirtaki is that of a build folder: `cmake --install` makes a prefix for find_package(Sirtaki)")
    return folder


def examples_path() -> str:
    """Returns the folder of the examples: train_digits, which is built, python/train_digits.py, and their data.

    Raises FileNotFoundError if the package has none.
    """
    folder = _installed("examples")
    if not os.path.exists(os.path.join(folder, "train_digits")):
        raise FileNotFoundError("this sirtaki has no examples: they are in wheels of scripts/build_wheel.sh, and in Sirtaki's sources")
    return folder


def launcher_path() -> str:
    """Returns the path of ``sirtakirun``: that of the installed package, of the build folder, or on PATH.

    Raises FileNotFoundError if there is none.
    """
    from sirtaki import _build

    for path in (_installed("bin", "sirtakirun"), _build.launcher):
        if path and os.access(path, os.X_OK):
            return path
    found = shutil.which("sirtakirun")
    if found is None:
        raise FileNotFoundError("sirtakirun was not built with this package, and is not on PATH")
    return found


def become(path: str, *arguments: str) -> NoReturn:
    """Replaces this process by a program of the package.

    Programs look for LibTorch beside the package. An environment may have torch elsewhere, as one that is made with
    --system-site-packages: LD_LIBRARY_PATH tells the program then, and the ranks that it starts.
    """
    environment = dict(os.environ)
    if os.path.exists(_installed("bin")) and not os.path.exists(_installed("..", "torch", "lib")):
        found = importlib.util.find_spec("torch")
        folders = [os.path.join(folder, "lib") for folder in (found and found.submodule_search_locations) or ()]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [environment.get("LD_LIBRARY_PATH"), *folders]))
    os.execve(path, [path, *arguments], environment)


def main() -> None:
    become(launcher_path(), *sys.argv[1:])


def checkpoint_main() -> None:
    become(_installed("bin", "sirtaki-checkpoint"), *sys.argv[1:])
