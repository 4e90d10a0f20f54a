"""Operations that overlap on two streams, for the tests of what exchanges enqueue (stream_races.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ep_server.exchange.api import ExchangeSpec, Payload, PendingCombine, View
from ep_server.exchange.fabric import copies
from ep_server.exchange.fabric.copies import CudaCopies, Slot
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange
from ep_server.exchange.host import HostExchange
from ep_server.exchange.shapes import Shapes
from tests.support.exchange.routing import make_inputs
from tests.support.fabric.stream_races import HOST, Races

TOKENS, HIDDEN = 8, 256


def spec_of(payload: Payload, rank: int = 0, ranks: int = 1) -> ExchangeSpec:
    """Six experts in turn."""
    placement = tuple(expert % ranks for expert in range(6))
    return ExchangeSpec(rank, ranks, placement, TOKENS, HIDDEN, 3, payload, num_banks=2)


def views_on_gpu(shapes: Shapes) -> None:
    """From now on, PADDED views are in the memory of the GPU."""
    padded = shapes.padded

    def made() -> Any:
        rows, scales = padded()
        rows = torch.empty(rows.shape, dtype=rows.dtype, device="the GPU")
        if scales is None:
            return rows, None
        plane = torch.empty(scales.transpose(1, 2).shape, dtype=scales.dtype, device="the GPU")
        return rows, plane.transpose(1, 2)

    shapes.padded = made  # type: ignore[method-assign]


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Written by the caller's stream."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="the GPU").copy_(tensor)


class Operation:
    """One dispatch and combine on a stream of the caller's, which overwrites and reads all that it may."""

    def __init__(self, exchange: FabricDeviceExchange | HierarchicalExchange, stream: Any, seed: int) -> None:
        self.exchange, self.stream, self.seed = exchange, stream, seed
        mine = make_inputs(exchange.spec, "max_tokens", seed)[exchange.spec.rank]
        with torch.cuda.stream(stream):
            given = on_gpu(mine.x), on_gpu(mine.ids), on_gpu(mine.weights)
            self.pending = exchange.dispatch_send(*given)
            for tensor in given:
                tensor.fill_(7)

    def receive(self) -> None:
        with torch.cuda.stream(self.stream):
            self.received = self.pending.recv(list(View)[self.seed % 3])

    def answer(self) -> None:
        with torch.cuda.stream(self.stream):
            answer = answers(self.received)
            self.returning = self.exchange.combine_send(answer, self.received)
            answer.fill_(7)

    def finish(self) -> torch.Tensor:
        with torch.cuda.stream(self.stream):
            out = None
            if self.seed % 2:
                out = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="the GPU").fill_(7)
            return self.returning.recv(out) * 2


def answers(received: Any) -> torch.Tensor:
    """The rows themselves, in the layout of the view."""
    rows = received.rows if received.row_ids is None else received.rows.index_select(0, received.row_ids)
    return rows.float().to(torch.bfloat16)


Sums = dict[tuple[int, int], torch.Tensor]  # by rank and seed: twice the result


def run(
    exchanges: Iterable[FabricDeviceExchange | HierarchicalExchange], streams: list[list[Any]], rounds: int
) -> Sums:
    """Two operations at a time on the two streams of each rank, which change places: every bank is used from
    both.
    """
    sums, made = Sums(), list(exchanges)
    for turn in range(rounds):
        running = [
            Operation(exchange, of_rank[(turn + i) % 2], 2 * turn + i)
            for i in range(2)
            for exchange, of_rank in zip(made, streams, strict=True)
        ]
        for half in (Operation.receive, Operation.answer):
            for operation in running:
                half(operation)
        sums |= {(each.exchange.spec.rank, each.seed): each.finish() for each in running}
    return sums


def run_alone(exchange: FabricDeviceExchange, rounds: int) -> Sums:
    """run() of one rank; then a third receive that needs the first one's staging, when nothing that the host
    did since waited for that.
    """
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    sums = run([exchange], [streams], rounds)
    first, second = Operation(exchange, streams[0], 0), Operation(exchange, streams[1], 1)
    first.receive()
    third = Operation(exchange, streams[1], 2)
    second.receive()
    third.receive()
    return sums


def assert_sums(sums: Sums, payload: Payload, ranks: int = 1) -> None:
    """Nobody's values are another operation's. Of FP8 answers are codes, not values."""
    if payload is not Payload.BF16:
        return
    for (rank, seed), found in sums.items():
        mine = make_inputs(spec_of(payload, rank, ranks), "max_tokens", seed)[rank]
        weights = mine.weights.where(mine.ids >= 0, 0).sum(1, keepdim=True)
        torch.testing.assert_close(found.float(), 2 * mine.x.float() * weights, rtol=2e-2, atol=1e-6)


def timelines(races: Races) -> set[str]:
    """All that accessed anything."""
    return {access.timeline for each in races.accesses.values() for access in each}


class Noted:
    """The inner exchange, whose native code reads and writes staging on the host."""

    def __init__(self, inner: HostExchange, races: Races) -> None:
        self.inner, self.races = inner, races

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def dispatch_send(self, *given: torch.Tensor) -> object:
        self.races.note(HOST, list(given), [], "dispatch_send")
        return self.inner.dispatch_send(*given)

    def combine_send(self, expert_out: torch.Tensor, *given: Any, **options: Any) -> NotedCombine:
        self.races.note(HOST, [expert_out], [], "combine_send")
        return NotedCombine(self.inner.combine_send(expert_out, *given, **options), self.races)


class NotedCombine:
    def __init__(self, pending: PendingCombine, races: Races) -> None:
        self.pending, self.races = pending, races

    def recv(self, out: torch.Tensor) -> torch.Tensor:
        self.races.note(HOST, [], [out], "combine recv")
        return self.pending.recv(out)


def no_event_for_the_caller(self: Any) -> None:
    self._slot.ended = self._stream.record_event()


def no_wait_for_the_slot(self: CudaCopies, slot: Slot) -> None:
    slot.ended = None


def no_wait_for_the_event(self: CudaCopies, event: object, what: str) -> None:
    pass


def no_wait_for_the_caller(self: CudaCopies, slot: Slot, *, into: torch.Tensor | None = None) -> Any:
    return copies._CudaDelivery(self._stream, torch.cuda.current_stream(), slot)


LEFT_OUT = {
    "the caller's stream for the copies": (copies._CudaDelivery, "finish", no_event_for_the_caller),
    "the host for copies that read staging": (CudaCopies, "reuse", no_wait_for_the_slot),
    "the host for copies at all": (CudaCopies, "_wait", no_wait_for_the_event),
    "copies for the caller's kernels": (CudaCopies, "delivery", no_wait_for_the_caller),
}
