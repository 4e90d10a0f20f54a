"""Recorded and replayed work: one CUDA graph per form of a step, in one memory pool.

On a device without graphs a replay repeats the work on the same tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from ep_server.backends.gpu.waiting import await_device
from ep_server.errors import InternalError

LEAST_OVERLAPPED = 64  # rows; with fewer there is less to hide than reading every weight twice costs
WARM_UPS = 2  # runs before a capture: libraries choose their kernels in them


class Form(NamedTuple):
    """bucket: rows that a step is padded to; with more than sequences at once, some are of chunks of prompts.

    timed: there are stamps between its phases.
    """

    bucket: int
    micro_batches: int = 1
    timed: bool = False


Work = Callable[[Form], torch.Tensor]


class Graphs:
    """Recorded work by form.

    Args:
        work: enqueues a step of a form on the current stream; returns what it leaves, which the next step of
          any form may overwrite.
        forms: to be recorded. seconds: until the device must have ended what is run before a capture.
    """

    def __init__(self, work: Work, forms: Iterable[Form], device: torch.device, seconds: float) -> None:
        self._work, self._device, self._seconds = work, device, seconds
        self.record_only(forms)
        self._left: dict[Form, torch.Tensor] = {}
        self._graphs: dict[Form, torch.cuda.CUDAGraph] = {}

    def record_only(self, forms: Iterable[Form]) -> None:
        """Before capture(): these forms in place of those given."""
        self._forms = frozenset(forms)
        self.buckets = sorted({form.bucket for form in self._forms})

    def bucket_of(self, rows: int) -> int:
        """The smallest bucket that holds so many rows; 0 = none does, or nothing was recorded."""
        at = bisect_left(self.buckets, rows)
        return self.buckets[at] if at < len(self.buckets) else 0

    @property
    def overlapped(self) -> frozenset[int]:
        """Buckets that have graphs of one and of two micro-batches."""
        return frozenset(b for b in self.buckets if {Form(b, 1), Form(b, 2)} <= self._forms)

    def __contains__(self, form: Form) -> bool:
        return form in self._forms

    def capture(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Records every form, the largest first: the smaller ones then fit into its memory. Collective.

        Raises: InternalError if the device does not end what is run before.
        """
        progress(0, len(self._forms))
        for done, form in enumerate(sorted(self._forms, reverse=True), start=1):
            for _ in range(WARM_UPS):
                self._left[form] = self._work(form)
            if self._device.type == "cuda":
                self._record(form)
            progress(done, len(self._forms))

    def replay(self, form: Form) -> torch.Tensor:
        """Enqueues the work of a form. Returns: what it leaves, at the same address in every replay.

        Raises: InternalError for another form.
        """
        if form not in self._left:
            raise InternalError(f"no graph for a step of {form}, there are {sorted(self._left)}")
        if form in self._graphs:
            self._graphs[form].replay()
        else:
            self._left[form] = self._work(form)
        return self._left[form]

    def _record(self, form: Form) -> None:
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        await_device(self._device, self._seconds, f"what was run before the capture of {form}")
        with torch.cuda.graph(graph, pool=pool):
            self._left[form] = self._work(form)
        self._graphs[form] = graph


def buckets_up_to(most: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64, of 16 to 256, of 64 beyond; the last one is `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max(most, 256) + 1, 64)]
    return [size for size in sizes if size < most] + [most]


def buckets_with_chunks(sequences: int, most: int) -> list[int]:
    """Of steps that may hold chunks of prompts: more rows than sequences, each a quarter more and a multiple
    of 64, up to `most`. None where a step has no more rows than sequences.
    """
    sizes, size = list[int](), sequences
    while size < most:
        size = min(-(-max(size * 5 // 4, size + 1) // 64) * 64, most)
        sizes.append(size)
    return sizes


def captured_forms(sequences: int, most: int, overlap: str, *, timed: bool = False) -> list[Form]:
    """Of all steps of a rank. sequences, most: rows of its largest step of single tokens, and of any.

    Where all steps are two micro-batches, those with chunks of prompts are run as they are.
    """
    singles = forms_of(buckets_up_to(sequences), overlap, timed=timed)
    return singles if overlap == "on" else singles + [Form(b) for b in buckets_with_chunks(sequences, most)]


def forms_of(buckets: Iterable[int], overlap: str, *, timed: bool = False) -> list[Form]:
    """What steps of these buckets may be run as: never, always or sometimes as two micro-batches.

    Args:
        timed: some of them with stamps.
    """
    counts = {"off": (1,), "on": (2,), "auto": (1, 2)}[overlap]
    return [
        Form(bucket, count, stamped)
        for bucket in buckets
        for count in counts
        if overlap != "auto" or count == 1 or bucket >= LEAST_OVERLAPPED
        for stamped in ((False, True) if timed else (False,))
    ]
