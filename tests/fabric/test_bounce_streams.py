"""What a BounceExchange enqueues on a GPU's streams, in which order: no access races with another.

Runs without a GPU (stream_races.py). That the checker notices a missing wait is tested by leaving out each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_server.ep import bounce_copies, bounce_staging
from ep_server.ep.bounce import BounceExchange
from ep_server.ep.bounce_copies import CudaCopies, Slot
from ep_server.ep.exchange import ExchangeSpec, Payload, View
from ep_server.ep.native import NativeExchange, PendingCombine
from ep_server.errors import ExchangeError
from tests.fabric import stream_races
from tests.fabric.stream_races import HOST, Races, watched
from tests.harness.routing import make_inputs
from tests.harness.single import make_single

CPU = torch.device("cpu")


class Noted:
    """The inner exchange, whose native code reads and writes staging on the host."""

    def __init__(self, inner: NativeExchange, races: Races) -> None:
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


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Written by the caller's stream."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="the GPU").copy_(tensor)


def poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(7)


def spec_of(payload: Payload) -> ExchangeSpec:
    return ExchangeSpec(0, 1, (0,) * 6, 8, 256, 3, payload, num_banks=2)


class Operation:
    """One dispatch and combine on a stream of the caller's, which overwrites and reads all that it may."""

    def __init__(self, exchange: BounceExchange, stream: Any, seed: int) -> None:
        self.exchange, self.stream, self.seed = exchange, stream, seed
        mine = make_inputs(exchange.spec, "max_tokens", seed)[0]
        with torch.cuda.stream(stream):
            given = on_gpu(mine.x), on_gpu(mine.ids), on_gpu(mine.weights)
            self.pending = exchange.dispatch_send(*given)
            poison(*given)

    def receive(self) -> None:
        with torch.cuda.stream(self.stream):
            self.received = self.pending.recv(list(View)[self.seed % 3])

    def answer(self) -> None:
        with torch.cuda.stream(self.stream):
            answer = answers(self.received)
            self.returning = self.exchange.combine_send(answer, self.received)
            poison(answer)

    def finish(self) -> torch.Tensor:
        with torch.cuda.stream(self.stream):
            out = None
            if self.seed % 2:
                out = torch.empty(8, 256, dtype=torch.bfloat16, device="the GPU").fill_(7)
            return self.returning.recv(out) * 2


def run(exchange: BounceExchange, rounds: int) -> list[torch.Tensor]:
    """Two operations at a time on two streams, which change places: every bank is used from both."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    sums = []
    for turn in range(rounds):
        pair = [Operation(exchange, streams[(turn + i) % 2], 2 * turn + i) for i in range(2)]
        for operation in pair:
            operation.receive()
        for operation in pair:
            operation.answer()
        sums += [operation.finish() for operation in pair]
    received_late(exchange, *streams)
    return sums


def received_late(exchange: BounceExchange, one: Any, other: Any) -> None:
    """The third receive needs the first one's staging, and nothing the host did since waited for that."""
    first, second = Operation(exchange, one, 0), Operation(exchange, other, 1)
    first.receive()
    third = Operation(exchange, other, 2)
    second.receive()
    third.receive()


def answers(received: Any) -> torch.Tensor:
    """The rows themselves, in the layout of the view."""
    rows = received.rows if received.row_ids is None else received.rows.index_select(0, received.row_ids)
    return rows.float().to(torch.bfloat16)


def explored(
    replace: Callable[..., None], payload: Payload = Payload.BF16
) -> tuple[Races, list[torch.Tensor]]:
    spec = spec_of(payload)
    replace(bounce_staging, "CHUNK_BYTES", 1024)  # several chunks
    with watched(replace) as races:
        inner = Noted(make_single(spec, "native"), races)
        exchange = BounceExchange(inner, CPU, copies=CudaCopies(CPU, spec.timeout_ns))
        sums = run(exchange, 4)
        exchange.close()
    return races, sums


@pytest.mark.parametrize("payload", [Payload.BF16, Payload.FP8])
def test_no_access_races_with_another(monkeypatch: pytest.MonkeyPatch, payload: Payload) -> None:
    races, sums = explored(monkeypatch.setattr, payload)
    assert races.found == []
    timelines = {access.timeline for each in races.accesses.values() for access in each}
    assert timelines == {
        HOST,
        "caller",
        "stream 1",
        "stream 2",
    }  # of the copies, of the caller
    if payload is Payload.BF16:
        spec = spec_of(payload)
        for seed, found in enumerate(sums):
            mine = make_inputs(spec, "max_tokens", seed)[0]
            weights = mine.weights.where(mine.ids >= 0, 0).sum(1, keepdim=True)
            torch.testing.assert_close(found.float(), 2 * mine.x.float() * weights, rtol=2e-2, atol=1e-6)


def no_event_for_the_caller(self: Any) -> None:
    self._slot.ended = self._stream.record_event()


def no_wait_for_the_slot(self: CudaCopies, slot: Slot) -> None:
    slot.ended = None


def no_wait_for_the_event(self: CudaCopies, event: object, what: str) -> None:
    pass


def no_wait_for_the_caller(self: CudaCopies, slot: Slot, *, into: torch.Tensor | None = None) -> Any:
    return bounce_copies._CudaDelivery(self._stream, torch.cuda.current_stream(), slot)


LEFT_OUT = {
    "the caller's stream for the copies": (bounce_copies._CudaDelivery, "finish", no_event_for_the_caller),
    "the host for copies that read staging": (CudaCopies, "reuse", no_wait_for_the_slot),
    "the host for copies at all": (CudaCopies, "_wait", no_wait_for_the_event),
    "copies for the caller's kernels": (CudaCopies, "delivery", no_wait_for_the_caller),
}


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_wait_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    monkeypatch.setattr(*LEFT_OUT[left_out])
    races, _ = explored(monkeypatch.setattr)
    assert races.found


def test_a_stream_that_never_ends_is_reported_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_races.Event, "query", lambda self: False)
    with watched(monkeypatch.setattr):
        copies = CudaCopies(CPU, timeout_ns=20_000_000)
        staged = copies.staging((4,), torch.float32)
        with pytest.raises(ExchangeError, match=r"tensors on their way to the host in 0.02 s"):
            copies.fetch((staged, on_gpu(torch.ones(4))))()


def test_a_wait_that_nobody_asked_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch.setattr) as races:
        int(on_gpu(torch.ones(1))[0])
    assert races.found == ["aten::_local_scalar_dense waits for the GPU"]
