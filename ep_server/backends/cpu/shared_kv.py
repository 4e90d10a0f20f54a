"""The memory of a CPU rank's KV cache where it outlives the rank, and what lost ranks have left in theirs.

A name is cleared and set by plain stores, in the order of the program: a process that is killed stops between
two instructions, and whoever looks at its memory does so once it runs no more code. Half a name is nobody's.
Units: blocks, bytes.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch

from ep_server.errors import InternalError
from ep_server.models.kv_memory import NAME_BYTES, KvMemoryLayout

NOTHING = bytes(NAME_BYTES)


class SharedKv:
    """A rank's place in models.kv_memory.KvMemory, which it fills and names; others' places, which it reads.

    The parts of its cache take the memory in their order.
    """

    def __init__(self, layout: KvMemoryLayout, fd: int, place: int) -> None:
        """fd: of the memory; stays open. Raises: OSError."""
        self._layout, self._fd = layout, fd
        self._own = mmap.mmap(fd, layout.nbytes, offset=place * layout.nbytes)
        self._parts = self._cut(self._own)
        self._taken = 0
        self._lost: dict[int, list[np.ndarray]] = {}  # by place

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the next part of the cache. Raises: InternalError if that is not what the layout has."""
        layout, size = self._layout, math.prod(shape) * dtype.itemsize
        if size != layout.blocks * layout.part_bytes or self._taken == layout.parts:
            raise InternalError(f"part {self._taken} of the KV cache has {size} bytes, not as in {layout}")
        offset = layout.names_bytes + self._taken * layout.pitch
        self._taken += 1
        count = size // dtype.itemsize
        return torch.frombuffer(self._own, dtype=dtype, count=count, offset=offset).view(shape)

    def set(self, block: int, name: bytes) -> None:
        """The content of a block is complete."""
        self._own[block * NAME_BYTES : (block + 1) * NAME_BYTES] = name

    def clear(self, block: int) -> None:
        """The next step may write to a block."""
        self._own[block * NAME_BYTES : (block + 1) * NAME_BYTES] = NOTHING

    def clear_all(self) -> None:
        """Nobody may use what was computed so far."""
        self._own[: self._layout.names_bytes] = bytes(self._layout.names_bytes)

    def open(self, places: Sequence[int]) -> dict[bytes, tuple[int, int]]:
        """Looks at what lost ranks have left, whose processes have ended. Returns: (place, block) by name.

        Raises: OSError.
        """
        layout, found = self._layout, dict[bytes, tuple[int, int]]()
        self._lost = {
            place: self._cut(
                mmap.mmap(self._fd, layout.nbytes, prot=mmap.PROT_READ, offset=place * layout.nbytes)
            )
            for place in places
        }
        for place in places:
            names = self._names(place)
            for block in range(layout.blocks):
                name = names[block * NAME_BYTES : (block + 1) * NAME_BYTES]
                if name != NOTHING:
                    found[name] = place, block
        return found

    def copy(self, blocks: Sequence[int], sources: Sequence[tuple[int, int, bytes]]) -> int:
        """Fills own blocks. sources: place, block and name. Returns: how many leading ones are right.

        Not all, if the memory was freed meanwhile. Names are freed first, so they are looked at last.
        """
        for block, (place, source, _) in zip(blocks, sources, strict=True):
            for mine, other in zip(self._parts, self._lost.get(place, ()), strict=False):
                mine[block] = other[source]
        names = {place: self._names(place) for place in {place for place, _, _ in sources}}
        for count, (place, source, name) in enumerate(sources):
            there = names[place][source * NAME_BYTES : (source + 1) * NAME_BYTES]
            if place not in self._lost or there != name:
                return count
        return len(sources)

    def close_lost(self) -> None:
        """Looks at nothing of lost ranks any more."""
        self._lost.clear()

    def _names(self, place: int) -> bytes:
        """Read from the file: to touch a mapping would make pages that were freed."""
        size = self._layout.blocks * NAME_BYTES
        found = os.pread(self._fd, size, place * self._layout.nbytes)
        return found.ljust(size, b"\0")

    def _cut(self, memory: mmap.mmap) -> list[np.ndarray]:
        layout = self._layout
        starts = [layout.names_bytes + number * layout.pitch for number in range(layout.parts)]
        size = layout.blocks * layout.part_bytes
        flat = [np.frombuffer(memory, np.uint8, size, start) for start in starts]
        return [part.reshape(layout.blocks, layout.part_bytes) for part in flat]
