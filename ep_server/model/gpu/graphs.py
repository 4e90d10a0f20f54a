"""Work that is recorded once and replayed: a CUDA graph for each size of step, all in one memory pool.

On a device without graphs a replay does the work again, on the same tensors. Knows nothing of models.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from ep_server.errors import InternalError

WARM_UPS = 2  # runs before a capture: libraries choose their kernels in them
Work = Callable[[int], torch.Tensor]


class Graphs:
    """Recorded work by bucket: an ascending row count that smaller steps are padded to.

    Args:
        work: enqueues a step padded to `bucket` rows on the current stream; returns what it leaves, at the
          same address in every replay.
        buckets: to be recorded, largest last.
    """

    def __init__(self, work: Work, buckets: Sequence[int], device: torch.device) -> None:
        self._work, self._device = work, device
        self.buckets = sorted(buckets)
        self._left: dict[int, torch.Tensor] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def bucket_of(self, rows: int) -> int:
        """The smallest bucket that holds so many rows; 0 = none does, or nothing was recorded."""
        at = bisect_left(self.buckets, rows)
        return self.buckets[at] if at < len(self.buckets) else 0

    def capture(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Records every bucket, the largest first: the smaller ones then fit into its memory. Collective."""
        progress(0, len(self.buckets))
        for done, bucket in enumerate(reversed(self.buckets), start=1):
            for _ in range(WARM_UPS):
                self._left[bucket] = self._work(bucket)
            if self._device.type == "cuda":
                self._record(bucket)
            progress(done, len(self.buckets))

    def replay(self, bucket: int) -> torch.Tensor:
        """Enqueues the work of a bucket. Returns: what it leaves. Raises: InternalError for another size."""
        if bucket not in self._left:
            raise InternalError(f"no graph for a step of {bucket} rows, there are {sorted(self._left)}")
        if bucket in self._graphs:
            self._graphs[bucket].replay()
        else:
            self._left[bucket] = self._work(bucket)
        return self._left[bucket]

    def _record(self, bucket: int) -> None:
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.graph(graph, pool=pool):
            self._left[bucket] = self._work(bucket)
        self._graphs[bucket] = graph


def buckets_up_to(most: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64, of 16 to 256, of 64 beyond; the last one is `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max(most, 256) + 1, 64)]
    return [size for size in sizes if size < most] + [most]
