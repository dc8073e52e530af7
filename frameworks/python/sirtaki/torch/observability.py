"""These functions look inside a run: timelines, metrics, marks, memory. docs/observability.md and docs/memory.md say
more. None is collective."""

from __future__ import annotations

from typing import Any, Dict

from sirtaki.torch._library import _C

__all__ = ["mark", "memory_use", "metrics", "release_memory", "start_timeline", "stop_timeline"]


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to write what this rank does to ``file_path``: a file ending in .json, which rank 0 alone writes, or a
    folder with one file for each rank. ``mark_cycles`` has no effect: there are no cycles."""
    del mark_cycles
    _C.start_timeline(file_path)


def stop_timeline() -> None:
    """Ends the timeline: everything up to now is in the file when this returns."""
    _C.stop_timeline()


def metrics() -> Dict[str, Any]:
    """Returns what this rank has done since init(), in numbers; see docs/observability.md. "last_step" has the same
    numbers for the last step alone. Times are in seconds."""
    return _C.metrics()


def mark(text: str) -> None:
    """Marks a moment of the program's own, in the timeline and the flight record."""
    _C.mark(text)


def memory_use() -> Dict[str, int]:
    """Returns the use of the memory for torch's large CPU tensors, in bytes; see docs/memory.md."""
    return _C.memory_use()


def release_memory() -> None:
    """Gives what that memory keeps back to the system."""
    _C.release_memory()
