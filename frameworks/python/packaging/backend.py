"""scikit-build-core's backend, which besides finds the torch to build against.

pip builds in an environment of its own, which sees no package of the one that it installs into. A torch that is there is
looked at all the same, for it is the one that the module will run with, and large: only where there is none does the
build ask for another, of the same version as the project's dependencies will.
"""

from __future__ import annotations

import os
import re
import sysconfig

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403
from wheel_metadata import SERIES, TORCH


def _version_of(folder):
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            found = re.search(r"^__version__ = ['\"]([^'\"]+)", file.read(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def _installed_torch():
    """The folder of a torch that serves, in the environment that pip installs into; None if there is none."""
    for scheme in ("platlib", "purelib"):
        folder = os.path.join(sysconfig.get_path(scheme), "torch")
        version = _version_of(folder)
        if version and version.startswith(SERIES + ".") and os.path.isdir(os.path.join(folder, "include")):
            return folder
    return None


def _torch_to_build_with():
    folder = _installed_torch()
    if folder is None:
        from importlib.util import find_spec   # the one that was asked for, or that of --no-build-isolation

        spec = find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"sirtaki: no torch to build with: install {TORCH}, or build without --no-build-isolation")
        folder = spec.submodule_search_locations[0]
    return folder


def _requirements(asked, config_settings):
    given = "cmake.define.LibTorch_ROOT" in (config_settings or {})
    return asked if given or _installed_torch() else [*asked, TORCH]


def _with_torch(config_settings):
    settings = dict(config_settings or {})
    if "cmake.define.LibTorch_ROOT" not in settings:
        settings["cmake.define.LibTorch_ROOT"] = _torch_to_build_with()
    return settings


def get_requires_for_build_wheel(config_settings=None):
    return _requirements(_build.get_requires_for_build_wheel(config_settings), config_settings)


def get_requires_for_build_editable(config_settings=None):
    return _requirements(_build.get_requires_for_build_editable(config_settings), config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return _build.build_wheel(wheel_directory, _with_torch(config_settings), metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return _build.build_editable(wheel_directory, _with_torch(config_settings), metadata_directory)
