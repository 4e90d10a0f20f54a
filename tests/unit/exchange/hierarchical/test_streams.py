"""What a HierarchicalExchange enqueues on a GPU's streams, in which order: no access races with another.

Runs without a GPU (stream_races.py): two ranks of one process, each a host of its own. In place of a
NvlinkExchange is one whose halves are noted as kernels of the caller's stream.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_server.errors import HookNotCalled
from ep_server.exchange.api import Payload, Received, View
from ep_server.exchange.fabric import host_staging
from ep_server.exchange.fabric.copies import CudaCopies
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.host_staging import Outgoing
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange
from ep_server.exchange.host import HostExchange, open_shm
from ep_server.exchange.segment import create_segment
from ep_server.exchange.spec import spec_of_host
from tests.support.exchange.single import make_single
from tests.support.fabric.stream_programs import (
    LEFT_OUT,
    Noted,
    Operation,
    Sums,
    assert_sums,
    run,
    spec_of,
    timelines,
    views_on_gpu,
)
from tests.support.fabric.stream_races import HOST, Races, address, watched

CPU, RANKS = torch.device("cpu"), 2


class OnStream:
    """The exchange inside a host: memory of a GPU, halves on the caller's stream, banks in their order."""

    def __init__(self, inner: HostExchange, races: Races) -> None:
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
        self.races.note(self.races.current.name, [], [received.rows], "intra release")
        self.freed[received.rows.data_ptr()] = self.races.current.record_event().clock
        self.inner.release(received)

    def reads(self, *given: torch.Tensor | None) -> None:
        self.races.note(
            self.races.current.name, [each for each in given if each is not None], [], "intra send"
        )

    def made(self, *tensors: torch.Tensor) -> None:
        self.races.of_gpu |= {address(each) for each in tensors if each.numel()}
        self.races.note(self.races.current.name, [], list(tensors), "intra recv")


class PendingOnStream:
    def __init__(self, intra: OnStream, pending: Any) -> None:
        self.intra, self.pending = intra, pending

    def recv(self, *given: View) -> Any:
        result = self.pending.recv(*given)
        if not isinstance(result, Received):
            self.intra.made(result)
            return result
        assert result.row_ids is not None
        self.intra.races.current.clock |= self.intra.freed.get(result.rows.data_ptr(), {})
        self.intra.races.of_gpu.add(address(result.rows))
        self.intra.made(result.row_ids, result.counts, result.offsets)
        return result


@contextlib.contextmanager
def exchanges(races: Races, payload: Payload) -> Iterator[list[HierarchicalExchange]]:
    """Of both ranks; experts in turn."""
    spec = spec_of(payload, 0, RANKS)
    fd, made = create_segment(spec), []
    for rank in range(RANKS):
        mine = replace(spec, rank=rank)
        inner = Noted(open_shm(mine, fd), races)
        inter = FabricDeviceExchange(inner, CPU, copies=CudaCopies(CPU, spec.timeout_ns))  # type: ignore[arg-type]
        views_on_gpu(inter.shapes)
        intra = make_single(spec_of_host(mine, range(rank, rank + 1)), "native")
        made.append(HierarchicalExchange(OnStream(intra, races), inter, (0, 1)))  # type: ignore[arg-type]
    os.close(fd)
    yield made
    for exchange in made:
        exchange.close()


def explored(replace: Callable[..., None], payload: Payload = Payload.BF16) -> tuple[Races, Sums]:
    replace(host_staging, "CHUNK_BYTES", 1024)  # several chunks
    with watched(replace) as races, exchanges(races, payload) as made:
        sums = run(made, [[torch.cuda.Stream() for _ in range(2)] for _ in made], 4)
    return races, sums


@pytest.mark.parametrize("payload", [Payload.BF16, Payload.FP8])
def test_no_access_races_with_another(monkeypatch: pytest.MonkeyPatch, payload: Payload) -> None:
    races, sums = explored(monkeypatch.setattr, payload)
    assert races.found == []
    found = timelines(races)
    assert HOST in found and len(found - {"caller"}) == 1 + 3 * RANKS  # two and that of the copies
    assert len(sums) == 8 * RANKS
    assert_sums(sums, payload, RANKS)


@pytest.mark.parametrize("left_out", ["the caller's stream for the copies", "the host for copies at all"])
def test_a_wait_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    monkeypatch.setattr(*LEFT_OUT[left_out])
    races, _ = explored(monkeypatch.setattr)
    assert races.found


def failed_beside(races: Races) -> None:
    """A send inside the host fails while tensors travel; the next one is on another stream."""
    with exchanges(races, Payload.BF16) as made:
        exchange, streams = made[0], [torch.cuda.Stream(), torch.cuda.Stream()]
        whole = exchange.intra.dispatch_send

        def fails(*given: torch.Tensor) -> Any:
            exchange.intra.dispatch_send = whole  # type: ignore[method-assign]
            raise HookNotCalled("no bank is free")

        exchange.intra.dispatch_send = fails  # type: ignore[method-assign]
        with pytest.raises(HookNotCalled):
            Operation(exchange, streams[0], 0)
        Operation(exchange, streams[1], 1)


def test_failed_send_does_not_block_the_next(
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
