"""``python -m sirtaki.horovod ARGUMENT...`` is ``python ARGUMENT...``, where ``import horovod.torch`` finds Sirtaki, also
in the processes that it starts."""

from __future__ import annotations

import os
import sys
from typing import List

from sirtaki.horovod import FOLDER, real_horovod, refusal


def python_options(arguments: List[str]) -> List[str]:
    """What stands before ``-m sirtaki.horovod``, where "-um" is "-u" too."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    if before[-1] == "sirtaki.horovod":
        before.pop()
    last = before.pop().removesuffix("sirtaki.horovod").removesuffix("m")
    return before if last == "-" else [*before, last]


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments:
        sys.exit("usage: python -m sirtaki.horovod SCRIPT.py [ARGUMENT...], or -m MODULE [ARGUMENT...]")
    place = real_horovod()
    if place is not None:
        sys.exit(f"sirtaki.horovod: {refusal(place)}")
    paths = os.environ.get("PYTHONPATH", "")
    if FOLDER not in paths.split(os.pathsep):
        # Last: it hides nothing that the program has put there. An empty entry is the current folder.
        os.environ["PYTHONPATH"] = paths + os.pathsep + FOLDER if paths else FOLDER
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *python_options(arguments), *arguments])


main()
