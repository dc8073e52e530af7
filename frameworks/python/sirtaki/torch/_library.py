"""Loads the C++ part, after a look at whether it fits the torch that is here."""

from __future__ import annotations

import torch

from sirtaki import _build


def _series(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _check() -> None:
    # torch's C++ interface changes with its minor versions, and nothing but a crash would tell.
    if _series(torch.__version__) != _series(_build.torch_version):
        raise ImportError(
            f"sirtaki {_build.version} was built with torch {_build.torch_version}, but torch {torch.__version__} is "
            f'installed: pip install "torch=={_series(_build.torch_version)}.*", or install a wheel of sirtaki for torch '
            f"{_series(torch.__version__)} (its name has +torch{_series(torch.__version__)}; pip install . in the sources makes one)."
        )
    if not torch.compiled_with_cxx11_abi():
        raise ImportError(
            f"sirtaki {_build.version} was built with torch {_build.torch_version}, whose C++ library has the C++11 "
            f"ABI, but the torch {torch.__version__} that is installed has the older ABI."
        )


_check()

from sirtaki import _C  # noqa: E402

__all__ = ["_C"]
