"""The memory of a CPU rank's KV cache where it outlives the rank, and what lost ranks have left in theirs.

A name is cleared and set by plain stores, in the order of the program: a process that is killed stops between
two instructions, and whoever looks at its memory does so once it runs no more code. Half a name is nobody's.
Units: blocks, bytes.
"""

from __future__ import annotations

import errno
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

    The parts of its cache take the memory in their order. Other places are read as a file: to touch a mapping
    of memory that was freed would allocate it again.
    """

    def __init__(self, layout: KvMemoryLayout, fd: int, place: int) -> None:
        """fd: of the memory; stays open. Raises: OSError."""
        self._layout, self._fd = layout, fd
        self._own = mmap.mmap(fd, layout.nbytes, offset=place * layout.nbytes)
        self._parts = self._cut(self._own)
        self._taken = 0

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

    def names(self, places: Sequence[int]) -> dict[bytes, tuple[int, int]]:
        """(place, block) by name of what ranks have left whose processes have ended. Raises: OSError."""
        found = dict[bytes, tuple[int, int]]()
        for place in places:
            names = self._names(place)
            for block in range(self._layout.blocks):
                name = names[block * NAME_BYTES : (block + 1) * NAME_BYTES]
                if name != NOTHING:
                    found[name] = place, block
        return found

    def copy(self, blocks: Sequence[int], sources: Sequence[tuple[int, int, bytes]]) -> int:
        """Fills own blocks. sources: place, block and name. Returns: how many leading ones are right.

        Not all, if the memory was freed meanwhile: names are freed first, so they are looked at last.
        Raises: OSError.
        """
        layout = self._layout
        for block, (place, source, _) in zip(blocks, sources, strict=True):
            at = place * layout.nbytes + layout.names_bytes + source * layout.part_bytes
            for number, mine in enumerate(self._parts):
                if os.preadv(self._fd, [mine[block]], at + number * layout.pitch) != layout.part_bytes:
                    raise OSError(errno.EIO, f"block {source} of place {place} was not read whole")
        names = {place: self._names(place) for place in {place for place, _, _ in sources}}
        for count, (place, source, name) in enumerate(sources):
            if names[place][source * NAME_BYTES : (source + 1) * NAME_BYTES] != name:
                return count
        return len(sources)

    def _names(self, place: int) -> bytes:
        size = self._layout.blocks * NAME_BYTES
        return os.pread(self._fd, size, place * self._layout.nbytes).ljust(size, b"\0")

    def _cut(self, memory: mmap.mmap) -> list[np.ndarray]:
        layout = self._layout
        starts = [layout.names_bytes + number * layout.pitch for number in range(layout.parts)]
        size = layout.blocks * layout.part_bytes
        flat = [np.frombuffer(memory, np.uint8, size, start) for start in starts]
        return [part.reshape(layout.blocks, layout.part_bytes) for part in flat]
