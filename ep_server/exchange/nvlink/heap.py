"""Which parts of a rank's heap in GPU memory are in use. Pure bookkeeping, in bytes.

A freed block may still be read by work that was enqueued before. So each free range has markers, for example
CUDA events, which whoever takes the range must wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

M = TypeVar("M")


@dataclass(slots=True)
class _Range(Generic[M]):
    begin: int
    end: int
    markers: list[M] = field(default_factory=list)


class Heap(Generic[M]):
    """First fit in address order, so that the end stays free.

    Args:
        size, unit: of the heap, and of its blocks.
        passed: whether a marker need not be waited for any more.
    """

    def __init__(self, size: int, unit: int, passed: Callable[[M], bool]) -> None:
        self._unit, self._passed = unit, passed
        self._free: list[_Range[M]] = [_Range(0, size // unit * unit)]
        self._taken: dict[int, int] = {}

    def fits(self, size: int) -> bool:
        """Whether take(size) succeeds."""
        needed = self._rounded(size)
        return any(free.end - free.begin >= needed for free in self._free)

    def take(self, size: int) -> tuple[int, list[M]] | None:
        """The offset of a new block, and the markers to wait for. None if nothing fits."""
        needed = self._rounded(size)
        for at, free in enumerate(self._free):
            if free.end - free.begin < needed:
                continue
            free.markers = [marker for marker in free.markers if not self._passed(marker)]
            begin, free.begin = free.begin, free.begin + needed
            if free.begin == free.end:
                del self._free[at]
            self._taken[begin] = needed
            return begin, list(free.markers)
        return None

    def give(self, offset: int, *markers: M) -> None:
        """Frees the block at `offset`. Its neighbours become one range with it."""
        given = _Range(offset, offset + self._taken.pop(offset), list(markers))
        kept: list[_Range[M]] = []
        for free in self._free:
            if given.begin in (free.begin, free.end) or given.end == free.begin:
                given = _Range(
                    min(given.begin, free.begin), max(given.end, free.end), [*given.markers, *free.markers]
                )
            else:
                kept.append(free)
        given.markers = [marker for marker in given.markers if not self._passed(marker)]
        self._free = sorted([*kept, given], key=lambda free: free.begin)

    def _rounded(self, size: int) -> int:
        return max(-(-size // self._unit), 1) * self._unit
