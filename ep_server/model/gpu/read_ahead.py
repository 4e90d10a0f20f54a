"""Weights on their way to L2 while the main stream waits for links and small kernels.

A decode step is bound by reading weights, but between two large products there are microseconds in which
nothing reads memory: norms, the router, dispatch and combine. Its stream is its own: nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_server.model.triton.touch import LINE, touch

EXPERT_BYTES, MATRIX_BYTES = 32 << 20, 40 << 20  # L2 of an H200 has 60 MB, and other work uses it too
_REGIONS = 128


class ReadAhead:
    """Beside the steps of the current stream. All of it can be captured; join() before that ends."""

    def __init__(self, device: torch.device, expert_bytes: int, matrix_bytes: int) -> None:
        self._expert_bytes, self._matrix_bytes = expert_bytes, matrix_bytes
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def experts(self, gate_up: torch.Tensor) -> None:
        """What the grouped GEMM reads first. gate_up: [E, 2 * I, H]."""
        regions = 2 * len(gate_up)
        size = min(self._expert_bytes, gate_up.nbytes) // regions // LINE * LINE
        if size:
            self._begin()
            with torch.cuda.stream(self._stream):
                touch(gate_up, regions, size)

    def matrices(self, weights: Sequence[torch.Tensor]) -> None:
        """The first bytes of several, in the order of their use."""
        left = self._matrix_bytes if weights else 0
        if left:
            self._begin()
        for weight in weights:
            size = min(left, weight.nbytes)
            left -= size
            if size // _REGIONS >= LINE and weight.nbytes % (_REGIONS * LINE) == 0:
                with torch.cuda.stream(self._stream):
                    touch(weight, _REGIONS, size // _REGIONS // LINE * LINE)

    def join(self) -> None:
        """The current stream waits for what was begun: a captured graph must end on one stream."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def _begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
