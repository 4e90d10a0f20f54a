"""Records a step once and replays it: one CUDA graph per GraphKey, all in one memory pool.

On a device without graphs, a replay runs the work again on the same tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ep_server.errors import InternalError
from ep_server.exchange.device_wait import await_current

LEAST_OVERLAPPED = 64  # rows; with fewer there is less to hide than reading every weight twice costs
WARM_UPS = 2  # runs before a capture, in which libraries choose their kernels


class GraphKey(NamedTuple):
    """bucket: rows that a step is padded to; if more than the sequences at once, it includes prompt chunks.

    timed: whether there are stamps between its phases. normal: with the exchange of many rows.
    copied: chunks attend to a copy of the cache, see chunk_copies.py.
    """

    bucket: int
    micro_batches: int = 1
    timed: bool = False
    normal: bool = False
    copied: bool = False

    def has_prompts(self, sequences: int) -> bool:
        """Whether it may run prompts, in one piece. sequences: at once."""
        return self.micro_batches == 1 and not 0 < self.bucket <= sequences


Work = Callable[[GraphKey], torch.Tensor]
# Rows of a step -> whether it uses the exchange of many rows; maybe both are possible.
Modes = Callable[[int], Sequence[bool]]


def unseen(done: int, total: int) -> None:
    """Progress that nobody follows."""


def few(rows: int) -> Sequence[bool]:
    """Modes of ranks without an exchange of many rows."""
    return (False,)


class Graphs:
    """Recorded work by key.

    Args:
        work: enqueues a step of a key on the current stream. Returns its result, which the next step of any
          key may overwrite.
        keys: to be recorded. seconds: deadline for the warm-up runs before a capture.
    """

    def __init__(self, work: Work, keys: Iterable[GraphKey], device: torch.device, seconds: float) -> None:
        self._work, self._device, self._seconds = work, device, seconds
        self.record_only(keys)
        self._left: dict[GraphKey, torch.Tensor] = {}
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}

    def record_modes(self, possible: Modes) -> None:
        """Replaces each key of one micro-batch by those of the ways it may run. Call it before capture()."""
        divided = [key for key in self._keys if key.micro_batches > 1]
        others = [key for key in self._keys if key.micro_batches == 1]
        self.record_only(
            [*divided, *(key._replace(normal=way) for key in others for way in possible(key.bucket))]
        )

    def record_only(self, keys: Iterable[GraphKey]) -> None:
        """Replaces the keys. Call it before capture()."""
        self._keys = frozenset(keys)
        self.buckets = sorted({key.bucket for key in self._keys})

    def bucket_of(self, rows: int) -> int:
        """The smallest bucket that holds so many rows; 0 = there is none, or nothing was recorded."""
        at = bisect_left(self.buckets, rows)
        return self.buckets[at] if at < len(self.buckets) else 0

    @property
    def overlapped(self) -> frozenset[int]:
        """Buckets that have graphs of one and of two micro-batches."""
        ways = [frozenset(key.bucket for key in self._keys if key.micro_batches == n) for n in (1, 2)]
        return ways[0] & ways[1]

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._keys

    def with_copy(self, key: GraphKey, copied: bool) -> GraphKey:
        """The key of a step, whose chunks have a copy or none. A step with one can run without it."""
        other = key._replace(copied=True)
        return other if copied and other in self._keys else key

    def capture(self, progress: Callable[[int, int], None] = unseen) -> None:
        """Records every key, the largest first, so that the smaller ones fit into its memory. Collective.

        Raises: InternalError if the device does not finish the warm-up runs.
        """
        progress(0, len(self._keys))
        runs = WARM_UPS if self._device.type == "cuda" else 1
        for done, key in enumerate(sorted(self._keys, reverse=True), start=1):
            for _ in range(runs):
                self._left[key] = self._work(key)
            if self._device.type == "cuda":
                self._record(key)
            progress(done, len(self._keys))

    def replay(self, key: GraphKey) -> torch.Tensor:
        """Enqueues the work of a key. Returns: its result, at the same address in every replay.

        Raises: InternalError for another key.
        """
        if key not in self._left:
            raise InternalError(f"no graph for a step of {key}, there are {sorted(self._left)}")
        if key in self._graphs:
            self._graphs[key].replay()
        else:
            self._left[key] = self._work(key)
        return self._left[key]

    def _record(self, key: GraphKey) -> None:
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        await_current(self._device, self._seconds, f"what was run before the capture of {key}")
        with torch.cuda.graph(graph, pool=pool):
            self._left[key] = self._work(key)
        graph.replay()  # the first one also copies the graph to the device, which takes longer
        self._graphs[key] = graph


def buckets_up_to(most: int) -> list[int]:
    """Buckets: 1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, then every 64; the last is `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max(most, 256) + 1, 64)]
    return [size for size in sizes if size < most] + [most]


def buckets_with_chunks(sequences: int, most: int) -> list[int]:
    """Buckets of steps that may hold prompt chunks: more rows than sequences, each a quarter more and a
    multiple of 64, up to `most`. No bucket if a step never has more rows than sequences.
    """
    sizes, size = list[int](), sequences
    while size < most:
        size = min(-(-max(size * 5 // 4, size + 1) // 64) * 64, most)
        sizes.append(size)
    return sizes


def captured_keys(
    sequences: int, most: int, overlap: str, *, timed: bool = False, copies: bool = False
) -> list[GraphKey]:
    """Keys of all captured steps. sequences, most: rows of the largest step of single tokens, and of any.

    If all steps are two micro-batches, those with prompt chunks run without a graph.
    copies: whether steps with prompt chunks have keys with a copy too.
    """
    singles = keys_of_buckets(buckets_up_to(sequences), overlap, timed=timed)
    if overlap == "on":
        return singles
    ways = (False, True) if copies else (False,)
    return singles + [GraphKey(b, copied=way) for b in buckets_with_chunks(sequences, most) for way in ways]


def keys_of_buckets(buckets: Iterable[int], overlap: str, *, timed: bool = False) -> list[GraphKey]:
    """The keys for these buckets: never, always or sometimes as two micro-batches.

    Args:
        timed: whether to add keys with stamps.
    """
    counts = {"off": (1,), "on": (2,), "auto": (1, 2)}[overlap]
    return [
        GraphKey(bucket, count, stamped)
        for bucket in buckets
        for count in counts
        if overlap != "auto" or count == 1 or bucket >= LEAST_OVERLAPPED
        for stamped in ((False, True) if timed else (False,))
    ]


def sizes_of(rows: int, micro_batches: int) -> list[int]:
    """Rows of each micro-batch: as even as possible, the first one the largest."""
    return [(rows + micro_batches - 1 - index) // micro_batches for index in range(micro_batches)]
