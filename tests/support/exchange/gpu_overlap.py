"""Two micro-batches whose transfers run on a stream of their own, beside products on the step's stream."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
import torch.distributed as dist

from ep_server.backends.gpu.moe.rows import Arrival, DeferredCombine, FusedRows, Rows, SideRows, Tokens
from ep_server.exchange.api import Payload, Received, View
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from ep_server.models.decoder import interleave
from tests.support.exchange.conformance import run_pair
from tests.support.exchange.gpu_group import a_models_spec, close_exchange, factors_of, open_exchange
from tests.support.exchange.gpu_programs import ROUTINGS, Cases
from tests.support.exchange.on_gpu import OnGpu

LAYERS, SMS, EAGER = 3, 48, 20


class Step:
    """A step of several layers: each half takes a case for each, and compares on the GPU."""

    def __init__(self, exchange: NvlinkExchange, cases: Cases, rows: Rows) -> None:
        self.exchange, self.cases, self.rows = exchange, cases, rows
        self.size = len(cases.x[0])
        self.factors = factors_of(exchange.spec).view(-1)
        busy = torch.randn(1024, 1024, dtype=torch.bfloat16, device="cuda")
        self.busy = busy if busy.is_cuda else busy[:8, :8]  # the emulation has one stream: nothing overlaps
        self.token = torch.arange(self.size, device="cuda")[:, None]
        self.step, self.wrong = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
        self.counted = torch.zeros_like(cases.counts[0])

    def run(self) -> None:
        interleave([self.half(0), self.half(1)])
        self.step += 1

    def half(self, number: int) -> Generator[None, None, None]:
        for layer in range(LAYERS):
            now = (self.step * 5 + number * 3 + layer) % len(self.cases.names)
            self.busy @ self.busy
            arrive = self.rows.dispatch(self.taken(now), Arrival(self.size, self.counted))
            yield
            received = arrive()
            self.note((received.counts != self.cases.counts.index_select(0, now)[0]).sum())
            combined = self.rows.combine(self.answers(received), received)
            del received
            yield
            wanted = self.cases.combined.index_select(0, now)[0]
            alive = self.token < self.cases.tokens.index_select(0, now)[0]
            sums = combined()
            if isinstance(sums, DeferredCombine):
                sums = sums.run()
            self.note(((sums.view(torch.int16) != wanted.view(torch.int16)) & alive).sum())

    def taken(self, now: torch.Tensor) -> Tokens:
        """A case's rows in memory that nobody holds beyond the transfer. Rows past its tokens go nowhere."""
        x, ids, weights, tokens = (
            t.index_select(0, now)[0]
            for t in (self.cases.x, self.cases.ids, self.cases.weights, self.cases.tokens)
        )
        return Tokens(x, torch.where(self.token < tokens, ids, -1), weights)

    def answers(self, received: Received) -> torch.Tensor:
        """Of an INDEX view; NaN where there is no row."""
        assert received.view is View.INDEX and received.row_ids is not None
        entry = torch.arange(len(received.row_ids), device="cuda")
        expert = torch.searchsorted(received.offsets[1:], entry, right=True).clamp(max=len(self.factors) - 1)
        inside = entry < received.offsets[-1]
        rows = received.rows[torch.where(inside, received.row_ids, 0)].float()
        found = torch.where(inside[:, None], rows * self.factors[expert][:, None], torch.nan)
        return found.to(torch.bfloat16)

    def note(self, wrong: torch.Tensor) -> None:
        self.wrong += wrong


def overlapped(group: dist.ProcessGroup, replays: int, delay_seconds: float | None = None) -> None:
    """Bit for bit as on paper: eager, replayed, in turn with steps of one stream; two banks are enough."""
    spec = replace(a_models_spec(group.rank(), group.size(), Payload.BF16), num_banks=2)
    exchange = open_exchange(group, spec)
    if delay_seconds is not None:
        exchange.inject_delay(delay_seconds)
    cases = Cases(spec, 4 * len(ROUTINGS))
    step, alone = (Step(exchange, cases, r) for r in (SideRows(exchange, SMS), FusedRows(exchange)))
    for _ in range(EAGER):
        step.run()
        alone.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for replay in range(replays):
        graph.replay()
        if replay % 50 == 0:
            alone.run()
    exchange.synchronize()
    assert int(step.step) == EAGER + replays
    assert int(alone.wrong) == 0, f"{int(alone.wrong)} elements or counts differ on one stream"
    assert int(step.wrong) == 0, f"{int(step.wrong)} elements or counts differ on two streams"
    run_pair(OnGpu(exchange, fused=True), "zipf", 3, View.PADDED)
    close_exchange(exchange)
