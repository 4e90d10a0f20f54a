"""The native exchange beyond the Protocol: errors, in-place views, measurements, membership, segment.

What it computes is the conformance suite's subject; here are the things that only this implementation has.
"""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ep_server import _C
from ep_server.errors import ConfigError, InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction, View
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.host import HostExchange, open_shm
from ep_server.exchange.segment import create_segment
from ep_server.exchange.spec import PAYLOADS, Waiting
from ep_server.records import RankStatistics
from tests.support.exchange.ranks import Peer, Ranks, run_ranks

HIDDEN, MAX_TOKENS, TOP_K, EXPERTS = 72, 6, 3, 4


def spec_of(**change: object) -> ExchangeSpec:
    fields = {"rank": 0, "num_ranks": 1, "placement": (0,) * EXPERTS, "max_tokens": MAX_TOKENS}
    return ExchangeSpec(**{**fields, "hidden": HIDDEN, "top_k": TOP_K, **change})  # type: ignore[arg-type]


def alone(**change: object) -> HostExchange:
    spec = spec_of(**change)
    fd = create_segment(spec)
    try:
        return open_shm(spec, fd)
    finally:
        os.close(fd)


@pytest.fixture
def exchange() -> Iterator[HostExchange]:
    one = alone()
    yield one
    one.close()


def tensors(tokens: int = 2) -> dict[str, torch.Tensor | None]:
    return {
        "x": torch.ones(tokens, HIDDEN, dtype=torch.bfloat16),
        "topk_ids": torch.tensor([[0, 3, -1]] * tokens).reshape(tokens, TOP_K),
        "topk_weights": torch.ones(tokens, TOP_K),
    }


@pytest.mark.parametrize(
    ("field", "bad", "said"),
    [
        ("x", torch.ones(2, HIDDEN), r"float32 \[2, 72\].*bfloat16 \[T=2, H=72\]"),
        ("x", torch.ones(2, 64).bfloat16(), r"\[2, 64\].*H=72"),
        ("x", torch.ones(HIDDEN).bfloat16(), r"\[72\].*H=72"),
        ("x", torch.ones(HIDDEN, 2).bfloat16().T, "strides"),
        ("x", torch.ones(7, HIDDEN).bfloat16(), "T = 7.*at most max_tokens = 6"),
        ("topk_ids", torch.zeros(2, TOP_K, dtype=torch.int32), "int32.*int64"),
        ("topk_ids", torch.zeros(3, TOP_K, dtype=torch.int64), r"\[3, 3\].*T=2, K=3"),
        ("topk_ids[1, 2]", torch.tensor([[0, 1, 2], [0, 1, 4]]), "'4'.*-1 to 3"),
        ("topk_ids[0, 1]", torch.tensor([[0, -2, 2], [0, 1, 3]]), "'-2'.*-1 to 3"),
        ("topk_ids[1, 2]", torch.tensor([[0, 1, 2], [2, -1, 2]]), "distinct"),
        ("topk_weights", torch.ones(2, TOP_K, dtype=torch.float64), "float64.*float32"),
        ("topk_weights", None, "given at dispatch"),
    ],
)
def test_a_bad_argument_is_named_and_harms_nothing(
    exchange: HostExchange, field: str, bad: torch.Tensor | None, said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said) as error:
        exchange.dispatch_send(**{**tensors(), field.partition("[")[0]: bad})  # type: ignore[arg-type]
    assert error.value.field == field
    for _ in range(2 * exchange.spec.num_banks):  # no epoch and no bank was spent on it
        received = exchange.dispatch_send(**tensors()).recv()  # type: ignore[arg-type]
        assert received.counts.tolist() == [2, 0, 0, 2]
        assert (exchange.combine_send(received.rows, received).recv() == 2).all()


def test_halves_refuse_what_does_not_belong_to_them(exchange: HostExchange) -> None:
    pending = exchange.dispatch_send(**tensors())  # type: ignore[arg-type]
    received = pending.recv()
    with pytest.raises(InvalidArgument, match="received once"):
        pending.recv()
    with pytest.raises(InvalidArgument, match=r"expert_out.*N=4"):
        exchange.combine_send(received.rows[:3], received)
    with pytest.raises(InvalidArgument, match="None: this dispatch was given them"):
        exchange.combine_send(received.rows, received, torch.ones(2, TOP_K))
    with pytest.raises(InvalidArgument, match="reduction"):
        exchange.combine_send(received.rows, received, reduction=Reduction.SOURCE)
    combine = exchange.combine_send(received.rows, received)
    with pytest.raises(InvalidArgument, match="out"):
        combine.recv(torch.empty(3, HIDDEN, dtype=torch.bfloat16))
    combine.recv()
    with pytest.raises(InvalidArgument, match="received once"):
        combine.recv()
    with pytest.raises(InvalidArgument, match="record"):
        exchange.all_gather(b"x" * 65)
    with pytest.raises(InvalidArgument, match="not this rank"):
        exchange.group.mask([0])
    with pytest.raises(InvalidArgument, match="phase"):
        exchange.group.set_faults([Fault(0, "dispatch", "lunch", Action.DELAY)])
    exchange.close()
    exchange.close()
    with pytest.raises(InvalidArgument, match="closed"):
        exchange.barrier()


def test_index_rows_alias_the_receive_region_and_outlive_close(exchange: HostExchange) -> None:
    first = exchange.dispatch_send(**tensors()).recv(View.INDEX)  # type: ignore[arg-type]
    again = exchange.dispatch_send(**tensors()).recv(View.INDEX)  # type: ignore[arg-type]
    assert first.rows.shape == (MAX_TOKENS, HIDDEN)
    assert first.row_ids is not None
    assert first.row_ids.tolist() == [0, 1, 0, 1]
    banks = exchange.layout.row_at(1, 0, 0) - exchange.layout.row_at(0, 0, 0)
    assert abs(again.rows.data_ptr() - first.rows.data_ptr()) == banks  # neighbours in one region: no copy
    exchange.close()
    assert (first.rows[first.row_ids] == 1).all()


def test_a_handle_serves_several_combines(exchange: HostExchange) -> None:
    received = exchange.dispatch_send(**tensors()).recv()  # type: ignore[arg-type]
    for factor in range(1, 9):
        assert (exchange.combine_send(received.rows * factor, received).recv() == 2 * factor).all()


def reduces_either_way(exchange: HostExchange) -> None:
    g = torch.Generator().manual_seed(exchange.spec.rank)
    x = torch.randn(MAX_TOKENS, HIDDEN, generator=g)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(MAX_TOKENS)])
    weights = torch.rand(MAX_TOKENS, TOP_K, generator=g)
    want = (weights.sum(1, keepdim=True) * x).double()
    for reduction in (Reduction.RANK, Reduction.SOURCE, None):
        received = exchange.dispatch_send(x, ids, weights).recv()
        y = exchange.combine_send(received.rows, received, reduction=reduction).recv()
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def test_a_source_spec_may_reduce_at_the_ranks_too() -> None:
    fields = {"placement": (0, 1, 2, 0), "max_tokens": MAX_TOKENS, "hidden": HIDDEN, "top_k": TOP_K}
    run_ranks(reduces_either_way, 3, {**fields, "payload": Payload.FP32, "reduction": Reduction.SOURCE}, 30)


def measured(exchange: HostExchange, rounds: int) -> dict[str, object]:
    tokens, waited = 2 + exchange.spec.rank, torch.zeros(2, dtype=torch.int64)
    for _ in range(rounds):
        x = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
        pending = exchange.dispatch_send(x, torch.tensor([[0, 2, -1]] * tokens), torch.ones(tokens, TOP_K))
        received = pending.recv(wait_stats=waited)
        exchange.combine_send(received.rows, received).recv(wait_stats=waited)
    exchange.all_gather(b"vote")
    assert waited.sum() > 0
    return exchange.statistics()


def test_statistics_count_every_operation_row_and_byte() -> None:
    fields = {"placement": (0, 1, 1, 0), "max_tokens": MAX_TOKENS, "hidden": HIDDEN, "top_k": TOP_K}
    for rank, measurements in enumerate(run_ranks(measured, 2, fields, 30, args=(7,))):
        statistics = RankStatistics(rank=rank, **measurements)
        for name in ("dispatch/send", "dispatch/wait", "dispatch/expand", "dispatch/total", "combine/send"):
            assert sum(statistics.histograms[name]) == 7, name
            assert statistics.sums[name] > 0
        assert sum(statistics.histograms["combine/reduce"]) == 7
        assert sum(statistics.histograms["vote/total"]) == 1
        sent, row, routing = 2 + rank, HIDDEN * 2, TOP_K * 8
        assert statistics.counters["bytes/dispatch"] == 7 * sent * (row + routing)  # to the one other rank
        assert statistics.counters["bytes_local/dispatch"] == 7 * sent * (row + routing)
        assert statistics.counters["bytes/combine"] == 7 * (3 - rank) * row
        assert statistics.counters["exchange_tokens"] == 7 * sent
        assert statistics.counters["exchange_rows"] == 7 * 5
        assert statistics.expert_tokens == ({0: 35, 3: 0} if rank == 0 else {1: 0, 2: 35})
        assert set(statistics.peer_wait_ns) == {
            (op, peer) for op in ("dispatch", "combine", "vote") for peer in (0, 1)
        }


def measured_many(exchange: HostExchange, rounds: int) -> dict[str, object]:
    assert exchange.normal is not None
    return measured(exchange.normal, rounds)


def test_operations_of_many_rows_are_counted_apart() -> None:
    """A row is written once, in its sender's own memory."""
    fields = {"placement": (0, 1, 1, 0), "max_tokens": MAX_TOKENS, "hidden": HIDDEN, "top_k": TOP_K}
    for rank, measurements in enumerate(run_ranks(measured_many, 2, fields, 30, args=(7,))):
        statistics = RankStatistics(rank=rank, **measurements)
        parts = {
            "dispatch": ("send", "wait", "expand", "total"),
            "combine": ("send", "wait", "reduce", "total"),
        }
        for op, each in parts.items():
            assert all(sum(statistics.histograms[f"normal_{op}/{part}"]) == 7 for part in each)
            assert f"{op}/total" not in statistics.histograms
        counters, row, routing = statistics.counters, HIDDEN * 2, TOP_K * 8
        assert counters["bytes/normal_dispatch"] == 0
        assert counters["bytes_local/normal_dispatch"] == 7 * (2 + rank) * (row + routing)
        assert counters["bytes/normal_combine"] == 7 * (3 - rank) * row
        assert counters["exchange_tokens"] == 7 * (2 + rank) and counters["exchange_rows"] == 7 * 5
        assert ("normal_dispatch", 1 - rank) in statistics.peer_wait_ns


def mapped(exchange: HostExchange) -> tuple[list[list[int]], list[list[int]]]:
    ids = torch.tensor([[0, 3, -1], [3, -1, -1], [1, 2, 0]])
    x = torch.ones(3, HIDDEN, dtype=torch.bfloat16)
    info, ranges = exchange.shapes.source_map()
    exchange.dispatch_send(x, ids, torch.ones(3, TOP_K)).recv(View.PADDED, source_map=(info, ranges))
    return info.tolist(), ranges.tolist()


def test_source_map_says_where_padded_rows_came_from() -> None:
    fields = {"placement": (0, 1, 1, 0), "max_tokens": 3, "hidden": HIDDEN, "top_k": TOP_K}
    zero, one = run_ranks(mapped, 2, fields, 30)
    assert zero[0] == [[0, 2, 0, 2, -1, -1], [0, 1, 0, 1, -1, -1]]
    assert zero[1] == [[2, 2 << 32 | 2], [2, 2 << 32 | 2]]
    assert one[0] == [[2, 2, -1, -1, -1, -1], [2, 2, -1, -1, -1, -1]]
    assert one[1] == [[1, 1 << 32 | 1], [1, 1 << 32 | 1]]


@pytest.mark.parametrize("hidden", [1, 31, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_sums_alike(hidden: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(hidden)
    rows = (torch.randn(5, hidden, generator=g) * 100).to(dtype)
    rows[0, 0], rows[1, hidden // 2], rows[2, hidden - 1] = float("nan"), float("inf"), -0.0
    weights = torch.randn(5, generator=g)
    want = torch.zeros(hidden)
    for i in range(5):
        want = want + weights[i] * rows[i].float()
    assert _C.row_kernels()[0].name == "base"
    for kernel in _C.row_kernels():
        out = torch.empty(hidden, dtype=dtype)
        addresses = [rows[i].data_ptr() for i in range(5)]
        kernel.weighted_sum(dtype == torch.float32, addresses, weights.data_ptr(), hidden, out.data_ptr())
        assert torch.equal(out.nan_to_num(7), want.to(dtype).nan_to_num(7)), kernel.name
        kernel.weighted_sum(dtype == torch.float32, [], weights.data_ptr(), hidden, out.data_ptr())
        assert (out == 0).all()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("scale", [None, -1.0, 1e-30, 0.37])
def test_every_instruction_set_rounds_every_bf16_alike(count: int, scale: float | None) -> None:
    """All bit patterns: NaN, infinities, denormals and both zeros, among ordinary values and alone."""
    g = torch.Generator().manual_seed(count)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    rows = torch.stack([every, every[torch.randperm(1 << 16, generator=g)], torch.full_like(every, -0.0)])
    weights = torch.full((count,), 1.0 if scale is None else scale)
    want = torch.zeros(1 << 16)
    for i in range(count):
        want = want + weights[i] * rows[i].float()
    nan = want.isnan()
    rounded = torch.where(nan, torch.zeros(()), want).to(torch.bfloat16).view(torch.int16)
    bits = torch.where(nan, torch.tensor(0x7FC0, dtype=torch.int16), rounded)
    addresses = [rows[i].data_ptr() for i in range(count)]
    for kernel in _C.row_kernels():
        out = torch.full_like(every, 3.0)
        kernel.weighted_sum(
            False, addresses, 0 if scale is None else weights.data_ptr(), 1 << 16, out.data_ptr()
        )
        assert torch.equal(out.view(torch.int16), bits), kernel.name


@pytest.mark.parametrize("payload", [Payload.FP8, Payload.FP8_POW2, Payload.FP8_UE8M0])
def test_every_instruction_set_quantises_alike(payload: Payload) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = torch.cat([every, every[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]])
    results = []
    for kernel in _C.row_kernels():
        q = torch.zeros(x.numel(), dtype=torch.uint8)
        scales = torch.zeros(x.numel() // 128, dtype=torch.int32)
        kernel.quantise(x.data_ptr(), x.numel(), PAYLOADS.index(payload), q.data_ptr(), scales.data_ptr())
        results.append((q, scales))
    for q, scales in results[1:]:
        assert torch.equal(q, results[0][0])
        assert torch.equal(scales, results[0][1])
    assert results[0][0].unique().numel() > 200  # nearly every e4m3 value occurs


def survives(exchange: HostExchange, peer: Peer) -> int:
    rank, total = exchange.spec.rank, 0
    exchange.barrier()
    peer.tell("attached")
    if rank == 1:
        peer.hear()  # killed here
    assert peer.hear() == "rank 1 is dead"
    exchange.group.abort()
    exchange.group.reset(dead=[1])
    for _ in range(6):
        x = torch.full((2, HIDDEN), rank + 1.0, dtype=torch.bfloat16)
        received = exchange.dispatch_send(x, torch.tensor([[0, 1, 2]] * 2), torch.ones(2, TOP_K)).recv()
        total += int(exchange.combine_send(received.rows, received).recv()[0, 0])
    return total


def test_a_reset_without_a_dead_rank_keeps_it_masked() -> None:
    fields = {"placement": (0, 1, 2, 0), "max_tokens": MAX_TOKENS, "hidden": HIDDEN, "top_k": TOP_K}
    with Ranks(survives, 3, fields) as ranks:
        assert [ranks.message(r, 30) for r in range(3)] == ["attached"] * 3
        ranks.kill(1)
        ranks.processes[1].join(10)
        for rank in (0, 2):
            ranks.tell(rank, "rank 1 is dead")
        ended = ranks.join(30)
    assert [ended[0].value, ended[2].value] == [6 * 2, 6 * 6], [o.trace for o in ended]


def test_segments_have_no_name_and_end_with_their_last_mapping() -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:ep_server_exchange (deleted)")

    gc.collect()
    named, mapped_before = set(Path("/dev/shm").iterdir()), mappings()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    one = alone()
    assert mappings() == mapped_before + 1
    assert set(Path("/dev/shm").iterdir()) == named
    one.close()
    assert mappings() == mapped_before
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="on_timeout"):
        Waiting(on_timeout="shrug")
    with pytest.raises(ConfigError, match="spin_us"):
        Waiting(spin_us=-2)
    with pytest.raises(ConfigError, match="liveness_seconds"):
        Waiting(liveness_seconds=0.0)


def test_an_exchange_does_not_travel(exchange: HostExchange) -> None:
    with pytest.raises(TypeError):
        pickle.dumps(exchange)
