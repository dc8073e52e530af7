"""Seeing inside a run: timelines, metrics, marks, memory. docs/observability.md and docs/memory.md say more."""

from __future__ import annotations

from typing import Any, Dict

from sirtaki.torch._library import _C


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """From now on this rank writes what it does to ``file_path``: a file ending in .json, which rank 0 alone writes,
    or a folder with one for each rank. ``mark_cycles`` says nothing here: there are no cycles."""
    del mark_cycles
    _C.start_timeline(file_path)


def stop_timeline() -> None:
    """Everything up to now is in the file when this returns."""
    _C.stop_timeline()


def metrics() -> Dict[str, Any]:
    """What this rank has done since init(), in numbers; see docs/observability.md. Under "last_step" the same of the
    last step alone. Times are in seconds."""
    return _C.metrics()


def mark(text: str) -> None:
    """A moment of the program's own, in the timeline and the flight record."""
    _C.mark(text)


def memory_use() -> Dict[str, int]:
    """Of the memory for torch's large CPU tensors, in bytes; see docs/memory.md."""
    return _C.memory_use()


def release_memory() -> None:
    """Gives what is kept of it back to the system."""
    _C.release_memory()
