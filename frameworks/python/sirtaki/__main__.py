"""python -m sirtaki says where the parts of the package are, and what is there to train with."""

from __future__ import annotations

import argparse
import sys

from sirtaki import __version__
from sirtaki._launcher import become, cmake_prefix_path, examples_path, launcher_path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sirtaki", description="Says where the parts of Sirtaki are.", allow_abbrev=False)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--cmake-prefix-path", action="store_true", help="the folder for CMAKE_PREFIX_PATH of a C++ project")
    choice.add_argument("--examples", action="store_true", help="the folder of train_digits and python/train_digits.py")
    choice.add_argument("--doctor", action="store_true",
                        help="what is found here to train with, and what to do where it is not: sirtakirun --check-build")
    choice.add_argument("--version", action="version", version=f"sirtaki {__version__}")
    arguments = parser.parse_args()
    try:
        if arguments.doctor:
            become(launcher_path(), "--check-build")
        print(cmake_prefix_path() if arguments.cmake_prefix_path else examples_path())
    except FileNotFoundError as error:
        sys.exit(f"python -m sirtaki: {error}")


main()
