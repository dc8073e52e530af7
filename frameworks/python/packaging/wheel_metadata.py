"""What of a wheel's metadata depends on the torch that it is built for.

torch's C++ interface changes with its minor versions, so a wheel needs the very series that it was built with, and is for one
Python and one series. pip builds for the usual series; scripts/build_wheel.sh names one in SIRTAKI_TORCH_SERIES, which then stands
in the wheel's version too, as the wheels for several lie in one folder.
"""

from __future__ import annotations

import os
import re

CHOSEN = os.environ.get("SIRTAKI_TORCH_SERIES", "")
SERIES = CHOSEN or "2.11"
TORCH = f"torch=={SERIES}.*"

if not re.fullmatch(r"[0-9]+\.[0-9]+", SERIES):
    raise SystemExit(f"SIRTAKI_TORCH_SERIES is {SERIES!r}; it is the first two numbers of torch's version, such as 2.11")


def dynamic_metadata(field, settings, project=None):
    """Is asked by scikit-build-core (tool.scikit-build.metadata in pyproject.toml)."""
    if field == "dependencies":
        return [TORCH]
    with open("CMakeLists.txt", encoding="utf-8") as file:
        version = re.search(r"^\s+VERSION ([0-9.]+)$", file.read(), re.MULTILINE)[1]
    return f"{version}+torch{SERIES}" if CHOSEN else version
