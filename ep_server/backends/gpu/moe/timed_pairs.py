"""Times dispatch and combine as steps on a GPU run them, without experts, for exchange.mode = auto."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from ep_server.backends.gpu.moe.moe import add_norm
from ep_server.backends.gpu.moe.rows import Arrival, RowsOfSteps, Tokens
from ep_server.backends.gpu.waiting import STEP_SECONDS
from ep_server.backends.timed_pairs import drawn_ids
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.exchange.device_wait import await_current

REPEATS = 4  # pairs in one measurement


def choices(spec: ExchangeSpec) -> int:
    """Rows that experts of this rank return, at most, for a token of each rank."""
    return spec.num_ranks * min(spec.top_k, max(len(spec.local_experts), 1))


def pair_bytes(spec: ExchangeSpec) -> int:
    """Memory for each token of a pair, of both ways and with half of it left over."""
    rows = choices(spec) + 2 * spec.num_ranks + 4
    return 2 * 2 * rows * spec.hidden * torch.bfloat16.itemsize


class GpuTimedPairs:
    """Pairs with experts drawn uniformly. What experts return is not written.

    Args:
        most: tokens of a pair. captured: steps are replayed from graphs, so these are too.
    """

    def __init__(
        self, exchange: Exchange, rows: RowsOfSteps, device: torch.device, most: int, *, captured: bool
    ) -> None:
        self._exchange, self._rows, self._device, self._captured = exchange, rows, device, captured
        spec, dtype, ids = exchange.spec, torch.bfloat16, drawn_ids(exchange, device)[:most]
        x = torch.zeros(most, spec.hidden, dtype=dtype, device=device)
        self._tokens = Tokens(x, ids, torch.ones(ids.shape, dtype=torch.float32, device=device))
        self._residual, self._weight = (
            torch.zeros_like(x),
            torch.ones(spec.hidden, dtype=dtype, device=device),
        )
        self._stats = torch.zeros(len(spec.local_experts), dtype=torch.int32, device=device)
        self._choices = choices(spec)
        self._size, self._work = 0, dict[bool, Callable[[], None]]()

    def run(self, normal: bool, tokens: int) -> int:
        """One pair with so many tokens on every rank, ns. normal: with the exchange of many rows.

        Collective. Raises: ExchangeError if a peer fails.
        """
        if tokens != self._size:
            self._size, self._work = tokens, {}
        if normal not in self._work:
            self._work[normal] = self._prepared(normal)
        self._exchange.barrier()
        began = time.perf_counter_ns()
        self._work[normal]()
        self._finish()
        return (time.perf_counter_ns() - began) // REPEATS

    def _prepared(self, normal: bool) -> Callable[[], None]:
        spec = self._exchange.spec
        out = torch.empty(self._size * self._choices, spec.hidden, dtype=torch.bfloat16, device=self._device)
        work = partial(self._pairs, normal, out)
        work()
        self._finish()
        if not self._captured or self._device.type != "cuda":
            return work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may move KV blocks
            work()
        return graph.replay

    def _pairs(self, normal: bool, out: torch.Tensor) -> None:
        rows = self._rows.many if normal else self._rows.one
        part = slice(self._size)
        given = Tokens(self._tokens.x[part], self._tokens.ids[part], self._tokens.gates[part])
        for _ in range(REPEATS):
            received = rows.dispatch(given, Arrival(self._size, self._stats))()
            assert received.row_ids is not None
            outputs = out[: len(received.row_ids)]
            add_norm(rows.combine(outputs, received)(), self._residual[part], self._weight, 1e-6)

    def _finish(self) -> None:
        seconds = STEP_SECONDS + self._exchange.spec.timeout_ns / 1e9
        await_current(self._device, seconds, "trial runs of dispatch and combine")
        self._rows.check()
