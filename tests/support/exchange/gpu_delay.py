"""What ranks on GPUs run in tests of an injected delay of the exchange over NVLink."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from ep_server.backends.gpu.moe.rows import SideRows
from ep_server.compat.deep_ep.bootstrap import group_segment
from ep_server.errors import ConfigError, GroupAborted
from ep_server.exchange.api import ExchangeSpec, Payload, Received, View
from ep_server.exchange.host import open_group
from ep_server.exchange.nvlink import delay as nvlink_delay
from ep_server.exchange.nvlink.delay import NvlinkDelay
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from ep_server.exchange.spec import control_spec
from tests.support.compare import assert_equal
from tests.support.exchange.conformance import run_pair
from tests.support.exchange.expected import expect
from tests.support.exchange.gpu_group import (
    a_models_spec,
    answer,
    close_exchange,
    factors_of,
    on_gpu,
    open_exchange,
    run_experts,
    run_fused,
    sums_without,
)
from tests.support.exchange.gpu_overlap import SMS, Step
from tests.support.exchange.gpu_programs import ROUTINGS, Cases
from tests.support.exchange.on_gpu import OnGpu
from tests.support.exchange.routing import make_inputs
from tests.support.gpus import gpu_of

NS = 1_000_000_000
SURE_NS = 999_000_000  # of a second: the clocks of host and GPU do not run alike
LONG_SECONDS, SHORT_SECONDS = 0.4, 0.002
ENDLESS_SECONDS = 19.0  # just below the deadline
TIMES = struct.Struct("<3q")
T = TypeVar("T")


def spec_of(group: dist.ProcessGroup) -> ExchangeSpec:
    spec = a_models_spec(group.rank(), group.size(), Payload.BF16, tokens=4)
    return replace(spec, timeout_ns=20 * NS)


def open_delayed(group: dist.ProcessGroup, seconds: float) -> tuple[NvlinkExchange, NvlinkDelay]:
    """Collective."""
    exchange = open_exchange(group, spec_of(group))
    return exchange, exchange.inject_delay(seconds)


def not_before(group: dist.ProcessGroup, fused: bool) -> list[int]:
    """Rows of dispatch and combine are visible no earlier than the delay after each peer began to send them.

    The ranks begin at different times. A sender's stream goes on at once.

    Returns: how far the clock of each rank is ahead of this one's, ns.
    """
    exchange, delay = open_delayed(group, 0.0)
    spec = exchange.spec
    run_pair(OnGpu(exchange, fused=fused), "max_tokens", 0, View.PADDED)  # loads the kernels
    delay.set(LONG_SECONDS)
    inputs = make_inputs(spec, "max_tokens", 1)
    given = on_gpu(inputs[spec.rank])

    def dispatch() -> Callable[[], Received]:
        if fused:
            return lambda: exchange.dispatch(*given)
        pending = exchange.dispatch_send(*given)
        return lambda: pending.recv(View.PADDED)

    received = _timed(exchange, dispatch)
    answers = run_experts(spec, received)

    def combine() -> Callable[[], torch.Tensor]:
        if fused:
            return lambda: exchange.combine(answers, received)
        return exchange.combine_send(answers, received).recv

    out = _timed(exchange, combine)
    assert_equal(out.cpu(), expect(spec, inputs).combined, "combined")
    ahead = delay.compare_clocks()
    close_exchange(exchange)
    return ahead


def _timed(exchange: NvlinkExchange, send: Callable[[], Callable[[], T]]) -> T:
    """What the second half returns. Checks the times of all ranks, which share a clock."""
    exchange.synchronize()
    exchange.barrier()
    time.sleep(0.05 * exchange.spec.rank)
    began = time.monotonic_ns()
    receive = send()
    exchange.synchronize()
    sent = time.monotonic_ns()
    result = receive()
    exchange.synchronize()
    records = exchange.all_gather(TIMES.pack(began, sent, time.monotonic_ns()))
    times = [TIMES.unpack(record) for record in records]
    mine = times.pop(exchange.spec.rank)
    for theirs in times:
        assert mine[2] - theirs[0] >= LONG_SECONDS * SURE_NS, (mine, theirs)
        assert mine[1] < theirs[2], (mine, theirs)
    return result


def same_results(group: dist.ProcessGroup, fused: bool) -> None:
    """Bit for bit as on paper, in every view, with two banks."""
    exchange, _ = open_delayed(group, SHORT_SECONDS)
    for seed, routing in enumerate(("max_tokens", "zipf", "dropped", "single_token", "all_to_one")):
        for view in View:
            run_pair(OnGpu(exchange, fused=fused), routing, seed, view)
    close_exchange(exchange)


def two_halves(group: dist.ProcessGroup, steps: int = 3) -> None:
    """Two micro-batches, each of which waits for the delay in its hooks, with two banks."""
    exchange, _ = open_delayed(group, SHORT_SECONDS)
    step = Step(exchange, Cases(exchange.spec, len(ROUTINGS)), SideRows(exchange, SMS))
    for _ in range(steps):
        step.run()
    exchange.synchronize()
    assert int(step.step) == steps
    assert int(step.wrong) == 0, f"{int(step.wrong)} elements or counts differ"
    close_exchange(exchange)


def captured(group: dist.ProcessGroup, replays: int = 50) -> None:
    """A captured pair has the delay that is set when it is replayed, and the same bits with each."""
    exchange, delay = open_delayed(group, 0.0)
    spec = exchange.spec
    inputs = make_inputs(spec, "zipf", 3)
    given, wanted = on_gpu(inputs[spec.rank]), expect(spec, inputs).combined
    factors = factors_of(spec)
    out = torch.empty_like(given[0])

    def pair() -> None:
        received = exchange.dispatch(*given)
        exchange.combine(answer(received, factors), received, out=out)

    pair()
    exchange.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair()
    for seconds in (0.0, LONG_SECONDS / 2, 0.0, SHORT_SECONDS):
        delay.set(seconds)
        for _ in range(1 if seconds > SHORT_SECONDS else replays):
            out.fill_(torch.nan)
            torch.cuda.synchronize()
            began = time.monotonic_ns()
            graph.replay()
            exchange.synchronize()
            assert time.monotonic_ns() - began >= 2 * seconds * SURE_NS  # dispatch, then combine
            assert_equal(out.cpu(), wanted, f"delay {seconds}")
    close_exchange(exchange)


def without_one(group: dist.ProcessGroup) -> None:
    """Nobody waits for a masked rank, and after the reset all ranks wait for each other."""
    exchange, delay = open_delayed(group, SHORT_SECONDS)
    spec = exchange.spec
    inputs, last = make_inputs(spec, "max_tokens", 1), spec.num_ranks - 1
    if spec.rank != last:
        exchange.mask([last])
        for turn in range(5):
            got = run_fused(exchange, inputs[spec.rank])
            assert_equal(got, sums_without(spec, inputs, last), f"turn {turn}")
    exchange.barrier()
    exchange.reset()
    for seconds in (0.0, SHORT_SECONDS):
        delay.set(seconds)
        run_pair(OnGpu(exchange), "max_tokens", 2, View.PADDED)
    close_exchange(exchange)


def aborted(group: dist.ProcessGroup) -> None:
    """An abort ends the wait for rows that have arrived and are not visible yet."""
    spec = spec_of(group)
    segment = group_segment(group, control_spec(spec))
    torch.cuda.set_device(gpu_of(spec.rank))
    control = open_group(control_spec(spec), segment)
    os.close(segment)
    exchange = NvlinkExchange(spec, control=control)
    delay = exchange.inject_delay(0.0)
    run_pair(OnGpu(exchange), "max_tokens", 0, View.PADDED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvlink_delay, "MAX_DELAY_SECONDS", ENDLESS_SECONDS)
        delay.set(ENDLESS_SECONDS)
    given = on_gpu(make_inputs(spec, "max_tokens", 1)[spec.rank])
    exchange.barrier()
    pending = exchange.dispatch_send(*given)
    exchange.synchronize()
    exchange.barrier()  # all rows are written
    if spec.rank == 0:
        time.sleep(SHORT_SECONDS)
        control.abort()
    else:
        with pytest.raises(GroupAborted, match=f"rank {spec.rank} ended the waits of its GPU"):
            pending.recv(View.PADDED)
            exchange.synchronize()
    exchange.reset()  # ends the delay too
    run_pair(OnGpu(exchange), "max_tokens", 2, View.PADDED)
    close_exchange(exchange)


def refused(group: dist.ProcessGroup) -> None:
    """What cannot be delayed is refused by name."""
    short = open_exchange(group, replace(spec_of(group), timeout_ns=NS // 2))
    many = open_exchange(group, spec_of(group), many=True)
    for exchange, seconds in ((short, -0.001), (short, 1.5), (short, 0.5), (many, 0.1)):
        with pytest.raises(ConfigError, match="delay_seconds"):
            exchange.inject_delay(seconds)
    for exchange in (short, many):
        run_pair(OnGpu(exchange), "max_tokens", 0, View.PADDED)
        close_exchange(exchange)
