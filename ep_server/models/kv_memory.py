"""Memory for the KV caches of CPU ranks, which outlives them: a file of the server, a place for each process.

A place begins with a name for each KV block, then come the blocks. The process that fills a place writes the
names: that of a block is cleared before the block may be written again, and set once its content is complete.
So after a loss at any moment a name is either that of the content, or of nothing. Needs no torch.
Units: bytes, blocks.
"""

from __future__ import annotations

import ctypes
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ep_server.models.families.spec import GqaSpec, ModelSpec
from ep_server.models.sizes import Dtype, kv_block_bytes

log = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None, use_errno=True)

PAGE = 4096
PUNCH_HOLE = 0x2 | 0x1  # FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE
NAME_BYTES = 16  # as the scheduler's digests; zeros name nothing
COMPUTED = "its requests are computed again; to keep it, lower scheduler.kv_fraction or kv_blocks"


@dataclass(frozen=True, slots=True)
class KvMemoryLayout:
    """Of a place. parts: tensors of the cache, layer by layer. part_bytes: of a block in one of them."""

    blocks: int
    parts: int
    part_bytes: int

    @staticmethod
    def of(spec: ModelSpec, blocks: int, block_size: int, dtype: Dtype) -> KvMemoryLayout:
        """For a model's cache. dtype: of the cache."""
        parts = spec.num_layers * (2 if isinstance(spec.attention, GqaSpec) else 1)
        return KvMemoryLayout(blocks, parts, kv_block_bytes(spec, block_size, dtype) // parts)

    @property
    def names_bytes(self) -> int:
        """Where the first part begins."""
        return _whole(self.blocks * NAME_BYTES)

    @property
    def pitch(self) -> int:
        """From one part to the next."""
        return _whole(self.blocks * self.part_bytes)

    @property
    def nbytes(self) -> int:
        """All of a place."""
        return self.names_bytes + self.parts * self.pitch


class KvMemory:
    """The file, as the server holds it. No place is ever used twice, so what has one keeps its content.

    fd: close-on-exec; processes inherit it, and the caller closes it after finish(). None: there is no file.
    place_bytes: of each.
    lost: places that lost ranks have left, until forget_lost(). Memory is freed in a thread: that takes a
      second for 20 GiB.
    """

    def __init__(self, layout: KvMemoryLayout | None = None, keeps: int = 0) -> None:
        """Without pages yet. layout: None = no process gets a place. keeps: of lost ranks, at once.

        A cache without a place is memory of its process: what it holds is computed again after a loss.
        """
        self.fd: int | None = None
        self.lost: list[int] = []
        self.place_bytes = 0 if layout is None else layout.nbytes
        self._names = 0 if layout is None else layout.names_bytes
        self._places = 0
        self._place_of: dict[int, int] = {}  # by rank
        self._keeps = keeps
        self._freeing = ThreadPoolExecutor(1, "free-kv")
        if layout is not None and not keeps:
            log.warning("there is no memory to keep the KV cache of a lost rank: %s", COMPUTED)
        elif layout is not None:
            try:
                self.fd = os.memfd_create("ep_server_kv", os.MFD_CLOEXEC)
            except OSError as error:
                log.warning("the system has no memory for KV caches that outlives their ranks: %s", error)

    def take(self, rank: int) -> int | None:
        """A new place for the process that becomes a rank; None if there is none."""
        self.leave(rank, lost=False)
        if self.fd is None:
            return None
        try:
            os.ftruncate(self.fd, (self._places + 1) * self.place_bytes)
        except OSError as error:  # a limit of file sizes, say, or of memory that is committed
            gib = self.place_bytes / 2**30
            log.warning("rank %d: no %.2f GiB for a KV cache that outlives it: %s", rank, gib, error)
            return None
        self._place_of[rank] = self._places
        self._places += 1
        return self._place_of[rank]

    def leave(self, rank: int, *, lost: bool) -> None:
        """The process of a rank has ended. lost: others copy from its place, if that is kept."""
        place = self._place_of.pop(rank, None)
        if place is None:
            return
        if lost and len(self.lost) < self._keeps:
            self.lost.append(place)
            return
        if lost:
            log.warning("there is no memory to keep the KV cache of lost rank %d: %s", rank, COMPUTED)
        self._freeing.submit(self._free, place)

    def forget_lost(self) -> bool:
        """Frees the places of lost ranks. Others may still look into them, and find no names.

        Returns: whether there were any.
        """
        places, self.lost = self.lost, []
        for place in places:
            self._freeing.submit(self._free, place)
        return bool(places)

    def finish(self) -> None:
        """Waits until nothing uses fd."""
        self._freeing.shutdown()

    def _free(self, place: int) -> None:
        """The names first: who copied a block that has its name afterwards has copied all of it."""
        assert self.fd is not None
        first = place * self.place_bytes
        try:
            _punch(self.fd, first, self._names)
            _punch(self.fd, first + self._names, self.place_bytes - self._names)
        except OSError as error:
            log.warning("%d bytes of a lost KV cache cannot be freed: %s", self.place_bytes, error)


def _punch(fd: int, first: int, nbytes: int) -> None:
    """Frees pages of a file. It needs no other descriptor, as a mapping does. Raises: OSError."""
    sizes = ctypes.c_int64(first), ctypes.c_int64(nbytes)
    if _LIBC.fallocate(fd, PUNCH_HOLE, *sizes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _whole(size: int) -> int:
    """In whole pages."""
    return -(-size // PAGE) * PAGE
