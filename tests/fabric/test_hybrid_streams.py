"""What a HybridExchange enqueues on a GPU's streams, in which order: no access races with another.

Runs without a GPU (stream_races.py): two ranks of one process, each a host of its own. In place of a
CudaExchange is one whose halves are noted as kernels of the caller's stream.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_server.ep import bounce_staging
from ep_server.ep.bounce import BounceExchange
from ep_server.ep.bounce_copies import CudaCopies
from ep_server.ep.bounce_pending import Outgoing
from ep_server.ep.exchange import ExchangeSpec, Payload, Received, View
from ep_server.ep.host_part import spec_of_host
from ep_server.ep.hybrid import HybridExchange
from ep_server.ep.native import NativeExchange
from ep_server.ep.segment import create_segment
from ep_server.errors import HookNotCalled
from tests.fabric.stream_races import HOST, Races, address, watched
from tests.fabric.test_bounce_streams import LEFT_OUT, Noted, answers, on_gpu, poison
from tests.harness.routing import make_inputs
from tests.harness.single import make_single

CPU, RANKS = torch.device("cpu"), 2


class OnStream:
    """The exchange inside a host: memory of a GPU, halves on the caller's stream, banks in their order."""

    def __init__(self, inner: NativeExchange, races: Races) -> None:
        self.inner, self.races = inner, races
        self.freed: dict[int, Any] = {}  # by bank: what had happened when it was given back

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def dispatch_send(self, *given: torch.Tensor) -> PendingOnStream:
        self.reads(*given)
        return PendingOnStream(self, self.inner.dispatch_send(*given))

    def combine_send(self, expert_out: torch.Tensor, *given: Any, **options: Any) -> PendingOnStream:
        self.reads(expert_out)
        return PendingOnStream(self, self.inner.combine_send(expert_out, *given, **options))

    def release(self, received: Received) -> None:
        """A kernel empties the bank."""
        self.races.note(self.races.current.name, [], [received.rows], "near release")
        self.freed[received.rows.data_ptr()] = self.races.current.record_event().clock
        self.inner.release(received)

    def reads(self, *given: torch.Tensor | None) -> None:
        self.races.note(
            self.races.current.name, [each for each in given if each is not None], [], "near send"
        )

    def made(self, *tensors: torch.Tensor) -> None:
        self.races.of_gpu |= {address(each) for each in tensors if each.numel()}
        self.races.note(self.races.current.name, [], list(tensors), "near recv")


class PendingOnStream:
    def __init__(self, near: OnStream, pending: Any) -> None:
        self.near, self.pending = near, pending

    def recv(self, *given: View) -> Any:
        result = self.pending.recv(*given)
        if not isinstance(result, Received):
            self.near.made(result)
            return result
        assert result.row_ids is not None
        self.near.races.current.clock |= self.near.freed.get(result.rows.data_ptr(), {})
        self.near.races.of_gpu.add(address(result.rows))
        self.near.made(result.row_ids, result.counts, result.offsets)
        return result


@contextlib.contextmanager
def exchanges(races: Races, payload: Payload) -> Iterator[list[HybridExchange]]:
    """Of both ranks; experts in turn."""
    spec = ExchangeSpec(0, RANKS, (0, 1) * 3, 8, 256, 3, payload, num_banks=2)
    fd, made = create_segment(spec), []
    for rank in range(RANKS):
        mine = replace(spec, rank=rank)
        inner = Noted(NativeExchange(mine, fd=fd), races)
        far = BounceExchange(inner, CPU, copies=CudaCopies(CPU, spec.timeout_ns))  # type: ignore[arg-type]
        near = make_single(spec_of_host(mine, range(rank, rank + 1)), "native")
        made.append(HybridExchange(OnStream(near, races), far, (0, 1)))  # type: ignore[arg-type]
    os.close(fd)
    yield made
    for exchange in made:
        exchange.close()


class Operation:
    """One dispatch and combine of a rank on a stream, which overwrites and reads all that it may."""

    def __init__(self, exchange: HybridExchange, stream: Any, seed: int) -> None:
        self.exchange, self.stream, self.seed = exchange, stream, seed
        mine = make_inputs(exchange.spec, "max_tokens", seed)[exchange.spec.rank]
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
            return self.returning.recv(out) * 1


def run(made: list[HybridExchange], rounds: int) -> dict[tuple[int, int], torch.Tensor]:
    """Two operations at a time on two streams of each rank, which change places. By rank and seed."""
    streams = [[torch.cuda.Stream() for _ in range(2)] for _ in made]
    sums = {}
    for turn in range(rounds):
        running = [
            Operation(exchange, streams[exchange.spec.rank][(turn + i) % 2], 2 * turn + i)
            for i in range(2)
            for exchange in made
        ]
        for half in (Operation.receive, Operation.answer):
            for operation in running:
                half(operation)
        sums |= {(each.exchange.spec.rank, each.seed): each.finish() for each in running}
    return sums


def explored(
    replace: Callable[..., None], payload: Payload = Payload.BF16
) -> tuple[Races, dict[tuple[int, int], torch.Tensor]]:
    replace(bounce_staging, "CHUNK_BYTES", 1024)  # several chunks
    with watched(replace) as races, exchanges(races, payload) as made:
        sums = run(made, 4)
    return races, sums


@pytest.mark.parametrize("payload", [Payload.BF16, Payload.FP8])
def test_no_access_races_with_another(monkeypatch: pytest.MonkeyPatch, payload: Payload) -> None:
    races, sums = explored(monkeypatch.setattr, payload)
    assert races.found == []
    timelines = {access.timeline for each in races.accesses.values() for access in each}
    assert HOST in timelines and len(timelines - {"caller"}) == 1 + 3 * RANKS  # two and that of the copies
    assert len(sums) == 8 * RANKS
    if payload is Payload.FP8:
        return  # answers are codes there, not values
    for (rank, seed), found in sums.items():
        spec = ExchangeSpec(rank, RANKS, (0, 1) * 3, 8, 256, 3, payload, num_banks=2)
        inputs = make_inputs(spec, "max_tokens", seed)
        weights = inputs[rank].weights.where(inputs[rank].ids >= 0, 0).sum(1, keepdim=True)
        torch.testing.assert_close(found.float(), inputs[rank].x.float() * weights, rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("left_out", ["the caller's stream for the copies", "the host for copies at all"])
def test_a_wait_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    monkeypatch.setattr(*LEFT_OUT[left_out])
    races, _ = explored(monkeypatch.setattr)
    assert races.found


def failed_beside(races: Races) -> None:
    """A send inside the host fails while tensors travel; the next one is on another stream."""
    with exchanges(races, Payload.BF16) as made:
        exchange, streams = made[0], [torch.cuda.Stream(), torch.cuda.Stream()]
        whole = exchange.near.dispatch_send

        def fails(*given: torch.Tensor) -> Any:
            exchange.near.dispatch_send = whole  # type: ignore[method-assign]
            raise HookNotCalled("no bank is free")

        exchange.near.dispatch_send = fails  # type: ignore[method-assign]
        with pytest.raises(HookNotCalled):
            Operation(exchange, streams[0], 0)
        Operation(exchange, streams[1], 1)


def test_tensors_of_a_send_that_failed_are_not_in_the_way_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with watched(monkeypatch.setattr) as races:
        failed_beside(races)
    assert races.found == []


def test_without_that_wait_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Outgoing[Any], arrived: Any, send: Any) -> None:
        self.arrived, self._send = lambda: None, lambda: (arrived(), send())[1]

    monkeypatch.setattr(Outgoing, "__init__", never)
    with watched(monkeypatch.setattr) as races:
        failed_beside(races)
    assert races.found
