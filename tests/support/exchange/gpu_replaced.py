"""Ranks on GPUs of which one is killed, or comes later: a new process takes its place beside the others.

Waits of the others end by the abort word.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_server.errors import GroupAborted
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.host import open_group
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from ep_server.exchange.spec import control_spec
from tests.support.compare import assert_equal
from tests.support.exchange.expected import expect
from tests.support.exchange.gpu_group import answer, factors_of, many_rows, on_gpu, sums_without
from tests.support.exchange.killed_rank import LOST, Segment, replaced_spec
from tests.support.exchange.ranks import Peer
from tests.support.exchange.routing import Inputs, make_inputs
from tests.support.gpus import gpu_of

WAIT = 120.0


def open_end(
    segment: Segment, rank: int, num_ranks: int, *, joins: bool = False, absent: Iterable[int] = ()
) -> NvlinkExchange:
    torch.cuda.set_device(gpu_of(rank))
    spec = replaced_spec(rank, num_ranks)
    control = open_group(control_spec(spec), segment.fd)
    control.mask(absent)
    return NvlinkExchange(spec, control=control, joins=joins, many=True)


class Step:
    """A pair on fixed tensors, and one of many rows; `captured`: as a graph, which holds all addresses."""

    def __init__(self, exchange: NvlinkExchange, *, captured: bool) -> None:
        self.exchange, self.factors = exchange, factors_of(exchange.spec)
        self.mine = on_gpu(make_inputs(exchange.spec, "max_tokens", 0)[exchange.spec.rank])
        self.out, self.many = torch.empty_like(self.mine[0]), torch.empty_like(self.mine[0])
        self.run()
        exchange.synchronize()
        self.graph = None
        if captured:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run()

    def run(self) -> None:
        received = self.exchange.dispatch(*self.mine)
        self.exchange.combine(answer(received, self.factors), received, out=self.out)
        self.many.copy_(many_rows(self.exchange, self.mine, self.factors))

    def sums(self, inputs: Inputs) -> torch.Tensor:
        """Of other inputs; waits for the GPU."""
        for held, new in zip(self.mine, on_gpu(inputs), strict=True):
            held.copy_(new)
        self.out.fill_(torch.nan)
        self.run() if self.graph is None else self.graph.replay()
        self.exchange.synchronize()
        assert_equal(self.many.cpu(), self.out.cpu(), "of many rows")
        return self.out.cpu()

    def check_without(self, seeds: range) -> None:
        """The same while LOST is absent."""
        spec = self.exchange.spec
        for seed in seeds:
            inputs = make_inputs(spec, "max_tokens", seed)
            got = self.sums(inputs[spec.rank])
            assert_equal(got, sums_without(spec, inputs, LOST), f"rank {spec.rank} without it, seed {seed}")

    def check(self, seeds: range) -> None:
        spec = self.exchange.spec
        for seed in seeds:
            inputs = make_inputs(spec, "max_tokens", seed)
            got = self.sums(inputs[spec.rank])
            assert_equal(got, expect(spec, inputs).combined, f"rank {spec.rank}, seed {seed}")


def survivor(segment: Segment, rank: int, num_ranks: int, captured: bool, peer: Peer) -> float:
    """Returns: seconds from the report of the loss to the end of its kernels' waits."""
    exchange = open_end(segment, rank, num_ranks)
    step = Step(exchange, captured=captured)
    step.check(range(1, 6))
    peer.tell("waits")
    peer.hear(WAIT)
    with pytest.raises(GroupAborted):
        step.sums(make_inputs(exchange.spec, "max_tokens", 6)[rank])
    ended = time.monotonic()
    peer.tell("ended")
    reported = peer.hear(WAIT)
    before = counted(exchange)
    exchange.reset([LOST], generation=1)
    step.check_without(range(30, 33))
    exchange.reset(generation=2)
    step.check(range(7, 12))
    after = counted(exchange)
    assert all(after[name] >= count for name, count in before.items()), "measurements never go back"
    assert exchange.masked == frozenset()
    exchange.barrier()
    exchange.close()
    return ended - float(reported)


def counted(exchange: NvlinkExchange) -> dict[str, int]:
    """Everything that only grows."""
    found = exchange.statistics()
    counts = {
        f"{name}[{n}]": count for name, all in found["histograms"].items() for n, count in enumerate(all)
    }
    return counts | found["sums"] | {f"all/{name}": count for name, count in found["counters"].items()}


def lost(segment: Segment, num_ranks: int, captured: bool, peer: Peer) -> None:
    exchange = open_end(segment, LOST, num_ranks)
    Step(exchange, captured=captured).check(range(1, 6))
    peer.tell("waits")
    peer.hear(WAIT)  # killed instead


def successor(segment: Segment, num_ranks: int, captured: bool, peer: Peer) -> None:
    """Captures its graph alone, before it meets the others."""
    peer.hear(WAIT)
    exchange = open_end(segment, LOST, num_ranks, joins=True)
    step = Step(exchange, captured=captured)
    exchange.barrier()
    spec, inputs = exchange.spec, make_inputs(exchange.spec, "max_tokens", 20)
    alone = [replace(one, ids=torch.where(_owned(spec, one), one.ids, -1)) for one in inputs]
    alone = [
        one if rank == LOST else replace(one, ids=torch.full_like(one.ids, -1))
        for rank, one in enumerate(alone)
    ]
    assert_equal(step.sums(inputs[LOST]), expect(spec, alone).combined, "alone")
    peer.tell("ready")
    peer.hear(WAIT)
    exchange.reset(generation=2)
    step.check(range(7, 12))
    exchange.barrier()
    exchange.close()


def _owned(spec: ExchangeSpec, inputs: Inputs) -> torch.Tensor:
    own = torch.tensor([owner == LOST for owner in spec.placement])
    return own[inputs.ids] & (inputs.ids >= 0)


def rank_of(segment: Segment, num_ranks: int, captured: bool, peer: Peer) -> Any:
    """What a process runs: the ranks in order, then the successor of the lost one."""
    number = segment.number
    if number == num_ranks:
        return successor(segment, num_ranks, captured, peer)
    if number == LOST:
        return lost(segment, num_ranks, captured, peer)
    return survivor(segment, number, num_ranks, captured, peer)


def stays(segment: Segment, rank: int, num_ranks: int, captured: bool, peer: Peer) -> None:
    """Starts without LOST, goes on with it, and without it again."""
    exchange = open_end(segment, rank, num_ranks, absent=[LOST])
    step = Step(exchange, captured=captured)
    assert exchange.masked == {LOST}
    exchange.barrier()
    step.check_without(range(1, 6))
    peer.tell("serves")
    peer.hear(WAIT)
    exchange.reset(generation=1)
    assert exchange.masked == frozenset()
    step.check(range(7, 12))
    exchange.reset([LOST], generation=2)
    step.check_without(range(12, 17))
    exchange.barrier()
    exchange.close()


def visits(segment: Segment, num_ranks: int, captured: bool, peer: Peer) -> None:
    """Comes when the others serve, and leaves them."""
    peer.hear(WAIT)
    exchange = open_end(segment, LOST, num_ranks, joins=True)
    step = Step(exchange, captured=captured)
    peer.tell("ready")
    peer.hear(WAIT)
    exchange.reset(generation=1)
    step.check(range(7, 12))
    exchange.close()


def grown_rank_of(segment: Segment, num_ranks: int, captured: bool, peer: Peer) -> None:
    """What a process runs: the ranks in order; LOST comes later and leaves."""
    if segment.number == LOST:
        return visits(segment, num_ranks, captured, peer)
    return stays(segment, segment.number, num_ranks, captured, peer)
