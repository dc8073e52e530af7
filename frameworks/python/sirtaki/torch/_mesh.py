"""A mesh arranges the ranks of the job in a grid: along one axis they have different data, along another one different
stages or parts of a model."""

from __future__ import annotations

from typing import Dict, List, Mapping

from sirtaki.torch._library import _C
from sirtaki.torch.process_sets import ProcessSet, _register

__all__ = ["Mesh", "mesh"]


class Mesh:
    """The ranks of the job in a grid; mesh() makes it. A row of an axis is the ranks that differ along that axis alone.

    Each row is a process set, which ends with shutdown(), or by remove_process_set() of each of sets(axis) on all
    ranks. Raises ValueError for an axis that is not there.
    """

    def __init__(self, impl: _C.Mesh) -> None:
        self._impl = impl
        self._sets = {row.id: _register(ProcessSet(row.ranks()), row) for axis in self.axes for row in impl.sets(axis)}

    @property
    def axes(self) -> Dict[str, int]:
        """The size of each axis, by its name."""
        return dict(self._impl.axes)

    def size(self, axis: str) -> int:
        """Returns the number of ranks along an axis."""
        return len(self._impl.ranks(axis))

    def coordinate(self, axis: str) -> int:
        """Returns this rank's place along an axis, from 0."""
        return self._impl.coordinate(axis)

    def ranks(self, axis: str) -> List[int]:
        """Returns the ranks of this rank's row by their coordinates: ``ranks("pipe")[0]`` has the first stage."""
        return self._impl.ranks(axis)

    def set(self, axis: str) -> ProcessSet:
        """Returns the process set of this rank's row."""
        return self._sets[self._impl.set(axis).id]

    def sets(self, axis: str) -> List[ProcessSet]:
        """Returns the process sets of all rows of an axis."""
        return [self._sets[row.id] for row in self._impl.sets(axis)]


def mesh(axes: Mapping[str, int]) -> Mesh:
    """Makes a mesh of all ranks of the job, and a process set of each row of each axis: ``mesh({"data": 2, "pipe": 2})``.

    Ranks come host by host and the coordinate of the last axis changes first, so give last the axis that communicates
    most. One size may be -1: what the others leave. Collective. Raises ValueError on every rank if the sizes do not
    multiply to the number of ranks, MismatchError if the ranks give different axes.
    """
    return Mesh(_C.mesh(list(axes.items())))
