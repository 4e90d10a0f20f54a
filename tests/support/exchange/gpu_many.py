"""What ranks on GPUs run with their exchange of many rows: the suite's cases, turns with few rows, losses."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import ExchangeError, InvalidArgument, PeerTimeout
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction, View
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from ep_server.exchange.nvlink.sizes import device_memory
from tests.support.compare import assert_equal
from tests.support.exchange.conformance import ONE_RANK_BARE, SCATTERED, UNEVEN, Shape, failure_of, run_pair
from tests.support.exchange.expected import expect
from tests.support.exchange.gpu_group import (
    close_exchange,
    factors_of,
    many_rows,
    on_gpu,
    open_exchange,
    sums_without,
)
from tests.support.exchange.on_gpu import OnGpu
from tests.support.exchange.routing import ROUTINGS, make_inputs

FP8 = (Payload.FP8, Payload.FP8_POW2, Payload.FP8_UE8M0)
SHAPES = {
    "odd": (Payload.BF16, Shape(6, 136, 3, UNEVEN)),
    "one_choice": (Payload.BF16, Shape(4, 8, 1, SCATTERED)),
    "sixteen_choices": (Payload.BF16, Shape(4, 16, 16, tuple(range(4)) * 6)),
    "one_slot": (Payload.BF16, Shape(1, 8, 2, UNEVEN)),
    "one_rank_bare": (Payload.BF16, Shape(4, 2040, 3, ONE_RANK_BARE)),
    "several_blocks": (Payload.BF16, Shape(150, 64, 4, tuple(range(4)) * 10)),
    **{payload.value: (payload, Shape(5, 1024, 4, SCATTERED)) for payload in FP8},
}
SECONDS = 1


def on_normal(few: NvlinkExchange) -> OnGpu:
    """Its exchange of many rows, for the suite."""
    many = few.normal
    assert many is not None
    many.synchronize = few.synchronize  # type: ignore[attr-defined]
    return OnGpu(many)  # type: ignore[arg-type]


def spec_of(group: dist.ProcessGroup, name: str, **change: object) -> ExchangeSpec:
    payload, shape = SHAPES[name]
    spec = shape.spec(group.rank(), group.size(), payload, Reduction.RANK)
    return ExchangeSpec(**{field: getattr(spec, field) for field in spec.__slots__} | change)  # type: ignore[arg-type]


def cases(group: dist.ProcessGroup) -> dict[str, str]:
    """Name -> failure text, of every shape and routing in both views."""
    results = {}
    for name in SHAPES:
        few = open_exchange(group, spec_of(group, name), many=True)
        many = on_normal(few)
        for seed, routing in enumerate(ROUTINGS):
            for view in (View.INDEX, View.COMPACT):
                run = partial(run_pair, many, routing, seed, view)  # type: ignore[arg-type]
                results[f"{name}-{routing}-{view.value}"] = failure_of(run)
        close_exchange(few)
    return results


def turns(group: dist.ProcessGroup) -> None:
    """Operations for few and for many rows follow one another; handles belong to one of them."""
    few = open_exchange(group, spec_of(group, "odd"), many=True)
    many = on_normal(few)
    for seed in range(3):
        for exchange in (OnGpu(few), many, many, OnGpu(few, fused=True), many):
            run_pair(exchange, ("uniform", "all_to_one", "nobody")[seed], seed, View.INDEX)  # type: ignore[arg-type]
    assert few.normal is not None
    mine = on_gpu(make_inputs(few.spec, "uniform", 0)[few.spec.rank])
    received = few.normal.dispatch_send(*mine).recv(View.INDEX)
    out = torch.zeros(len(received.row_ids), few.spec.hidden, dtype=torch.bfloat16).cuda()  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="handle"):
        few.combine_send(out, received)
    few.normal.combine_send(out, received).recv()
    close_exchange(few)


def measurements(group: dist.ProcessGroup) -> None:
    """Every part, row and byte of operations for many rows, and waits for a rank that is late."""
    few, operations, late_seconds = open_exchange(group, spec_of(group, "odd"), many=True), 3, 0.5
    spec, rank, last = few.spec, group.rank(), group.size() - 1
    many = on_normal(few)
    for _ in range(operations):
        if rank == last:
            time.sleep(late_seconds)
        run_pair(many, "uniform", 4, View.INDEX)  # type: ignore[arg-type]
    few.synchronize()
    found = few.statistics()
    measured = {"dispatch": ("send", "wait", "expand", "total"), "combine": ("send", "wait", "total")}
    for op, parts in measured.items():
        for part in parts:
            assert sum(found["histograms"][f"normal_{op}/{part}"]) == operations, (op, part)
        sums = {part: found["sums"][f"normal_{op}/{part}"] for part in parts}
        assert max(sums.values()) == sums["total"] > 0, sums
        assert f"{op}/total" not in found["histograms"]
    waited = found["peer_wait_ns"]["normal_dispatch", last]
    assert rank == last or waited > late_seconds / 2 * 1e9, found["peer_wait_ns"]
    inputs, sizes = make_inputs(spec, "uniform", 4), (2 * spec.hidden, 12 * spec.top_k)
    owners = torch.tensor(spec.placement)
    goes = [  # rows of each rank for each rank
        [int(((owners[each.ids] == r) & (each.ids >= 0)).any(1).sum()) for r in range(last + 1)]
        for each in inputs
    ]
    sent = sum(goes[rank]) - goes[rank][rank]
    received = sum(row[rank] for row in goes)
    counters = found["counters"]
    assert counters["bytes/normal_dispatch"] == operations * sent * sum(sizes)
    assert counters["bytes_local/normal_dispatch"] == operations * goes[rank][rank] * sum(sizes)
    assert counters["bytes/normal_combine"] == operations * (received - goes[rank][rank]) * sizes[0]
    assert counters["exchange_rows"] == operations * received
    assert counters["exchange_tokens"] == operations * len(inputs[rank].x)
    planned = device_memory(spec, many=True)
    assert planned.heap > 0 and planned.step > 0
    assert 0 <= few.capabilities.memory_bytes - planned.held < 1 << 16, "tables beside the region"
    close_exchange(few)


def refused(group: dist.ProcessGroup) -> None:
    """What it cannot carry: repeated ids, sums at the source, rows of odd lengths."""
    few = open_exchange(group, spec_of(group, "odd"), many=True)
    assert few.normal is not None
    mine = make_inputs(few.spec, "max_tokens", 0)[few.spec.rank]
    mine.ids[2, 1] = mine.ids[2, 0] = 3
    with pytest.raises((ExchangeError, InvalidArgument)):
        few.normal.dispatch_send(*on_gpu(mine)).recv(View.INDEX)
        few.synchronize()
    few.close()
    for change in ({"reduction": Reduction.SOURCE}, {"hidden": 129}):
        other = open_exchange(group, spec_of(group, "odd", **change), many=True)
        assert other.normal is None
        close_exchange(other)
    plain = open_exchange(group, spec_of(group, "odd"))
    assert plain.normal is None
    close_exchange(plain)


def replayed(group: dist.ProcessGroup) -> None:
    """A captured pair gives the sums of other tokens and routes at each replay, as few rows do."""
    few = open_exchange(group, spec_of(group, "several_blocks"), many=True)
    spec, rank = few.spec, group.rank()
    x, ids, weights = on_gpu(make_inputs(spec, "max_tokens", 0)[rank])
    pair = partial(many_rows, few, (x, ids, weights), factors_of(spec))
    pair()
    few.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = pair()
    for seed in range(20):
        inputs = make_inputs(spec, "max_tokens", seed)
        for into, new in zip((x, ids, weights), on_gpu(inputs[rank]), strict=True):
            into.copy_(new)
        graph.replay()
        few.synchronize()
        assert_equal(result.cpu(), expect(spec, inputs).combined, f"replay {seed}")
        if seed % 5 == 0:
            run_pair(OnGpu(few, fused=True), "uniform", seed, View.INDEX)  # type: ignore[arg-type]
    close_exchange(few)


def lost(group: dist.ProcessGroup, call: str) -> None:
    """The last rank stays away: every wait of the others ends, and a new generation goes on without it."""
    few = open_exchange(group, spec_of(group, "odd", timeout_ns=int(SECONDS * 1e9)), many=True)
    assert few.normal is not None
    dead = group.size() - 1
    inputs = make_inputs(few.spec, "max_tokens", 1)
    mine = on_gpu(inputs[group.rank()])
    received = None
    if call == "combine":
        received = few.normal.dispatch_send(*mine).recv(View.INDEX)
        few.synchronize()
    if group.rank() == dead:
        for _ in range(2):
            dist.barrier(group)
        few.close()
        return
    with pytest.raises(ExchangeError) as caught:
        if received is None:
            received = few.normal.dispatch_send(*mine).recv(View.INDEX)
        few.synchronize()
        out = torch.zeros(len(received.row_ids), few.spec.hidden, dtype=torch.bfloat16)  # type: ignore[arg-type]
        few.normal.combine_send(out.cuda(), received).recv()
        few.synchronize()
    if isinstance(caught.value, PeerTimeout):
        assert caught.value.peer == dead
    dist.barrier(group)
    few.reset([dead])
    again = on_normal(few)
    for seed in (1, 2):
        _without(again, seed, dead)
    dist.barrier(group)
    few.close()


def _without(exchange: OnGpu, seed: int, dead: int) -> None:
    spec = exchange.spec
    inputs = make_inputs(spec, "uniform", seed)
    mine = inputs[spec.rank]
    received = exchange.dispatch_send(mine.x.clone(), mine.ids.clone(), mine.weights.clone()).recv(
        View.COMPACT
    )
    left = [
        each if rank != dead else type(each)(each.x[:0], each.ids[:0], each.weights[:0])
        for rank, each in enumerate(inputs)
    ]
    expected = expect(spec, left)
    assert len(received.rows) == len(expected.entries)
    factors = torch.tensor([(1.0 + e / 16) * (-1 if e % 2 else 1) for e in spec.local_experts])
    by_row = factors.repeat_interleave(received.counts.cpu().long())
    outputs = (received.rows.float() * by_row[:, None]).to(torch.bfloat16)
    out = exchange.combine_send(outputs, received).recv()
    assert_equal(out, sums_without(spec, left, dead), "without the lost rank")
