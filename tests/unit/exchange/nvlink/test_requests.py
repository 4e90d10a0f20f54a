"""What the exchange on GPUs refuses and allocates, on tensors of the CPU: none of it asks a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_server.errors import ConfigError, InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Handle, Payload, Received, RecvOptions, Reduction, View, Wire
from ep_server.exchange.shapes import Shapes
from ep_server.exchange.validate import (
    check_combine_weights,
    check_dispatch,
    combine_mode,
    handle_of,
    rank_bits,
)

pytest.importorskip("ep_server._cuda", reason="built without nvcc")

from ep_server.exchange.nvlink.launch import check_device_spec

CPU = torch.device("cpu")
TOKENS, HIDDEN, TOP_K, RANKS, LOCAL = 6, 640, 2, 3, 2
SPEC = ExchangeSpec(1, RANKS, (0, 1, 2, 1), TOKENS, HIDDEN, TOP_K, Payload.FP8, num_banks=2)
PADDED = RANKS * TOKENS  # 18: a scale column is padded to 20 words
SHAPES = Shapes(SPEC, aligned=True)


def inputs(tokens: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    return x, torch.zeros(tokens, TOP_K, dtype=torch.int64), torch.zeros(tokens, TOP_K)


# -- specs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("num_ranks", {"num_ranks": 9, "placement": tuple(range(9))}),
        ("placement", {"placement": tuple(e % RANKS for e in range(2049))}),
        ("max_tokens", {"max_tokens": 32769}),
        ("payload", {"payload": Payload.FP32}),
        ("hidden", {"hidden": 100}),
    ],
)
def test_specs_that_no_gpu_can_carry(field: str, changed: dict[str, Any]) -> None:
    check_device_spec(SPEC, "raise")
    with pytest.raises(ConfigError) as caught:
        check_device_spec(replace(SPEC, **changed), "raise")
    assert caught.value.field == field


def test_what_follows_a_deadline_is_one_of_two() -> None:
    check_device_spec(SPEC, "mask")
    with pytest.raises(ConfigError, match=r"on_timeout.*one of raise, mask"):
        check_device_spec(SPEC, "ignore")


# -- dispatch -----------------------------------------------------------------------------------------


def test_a_dispatch_that_fits() -> None:
    assert check_dispatch(SPEC, CPU, *inputs()) == 4
    assert check_dispatch(SPEC, CPU, *inputs(0)) == 0
    x, ids, _ = inputs(TOKENS)
    assert check_dispatch(SPEC, CPU, x, ids, None, pushes_weights=True) == TOKENS


@pytest.mark.parametrize(
    ("field", "at", "wrong"),
    [
        ("x", 0, torch.zeros(4, HIDDEN)),
        ("x", 0, torch.zeros(4, HIDDEN + 1, dtype=torch.bfloat16)),
        ("x", 0, torch.zeros(4 * HIDDEN, dtype=torch.bfloat16)),
        ("x", 0, torch.zeros(HIDDEN, 4, dtype=torch.bfloat16).T),
        ("x", 0, torch.zeros(4, HIDDEN, dtype=torch.bfloat16, device="meta")),
        ("x", 0, torch.zeros(TOKENS + 1, HIDDEN, dtype=torch.bfloat16)),
        ("topk_ids", 1, torch.zeros(4, TOP_K, dtype=torch.int32)),
        ("topk_ids", 1, torch.zeros(3, TOP_K, dtype=torch.int64)),
        ("topk_weights", 2, torch.zeros(4, TOP_K, dtype=torch.bfloat16)),
        ("topk_weights", 2, torch.zeros(4, TOP_K + 1)),
    ],
)
def test_tensors_that_a_dispatch_refuses(field: str, at: int, wrong: torch.Tensor) -> None:
    given: list[torch.Tensor] = list(inputs())
    given[at] = wrong
    with pytest.raises(InvalidArgument) as caught:
        check_dispatch(SPEC, CPU, given[0], given[1], given[2])
    assert caught.value.field == field


# -- what a receive fills -----------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [Payload.BF16, Payload.FP8, Payload.FP8_UE8M0])
def test_tensors_of_each_view(payload: Payload) -> None:
    shapes = Shapes(replace(SPEC, payload=payload, hidden=1024), aligned=True)
    fp8, ue8m0 = payload != Payload.BF16, payload == Payload.FP8_UE8M0
    groups, dtype = (2, torch.int32) if ue8m0 else (8, torch.float32)
    row_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16

    rows, scales = shapes.padded()
    assert (rows.shape, rows.dtype) == ((LOCAL, PADDED, 1024), row_dtype)
    compact, compact_scales = shapes.compact(shapes.most_rows)
    assert (compact.shape, compact.dtype) == ((PADDED * LOCAL, 1024), row_dtype)
    assert (scales is not None, compact_scales is not None) == (fp8, fp8)
    if scales is not None and compact_scales is not None:
        assert (scales.shape, scales.dtype) == ((LOCAL, PADDED, groups), dtype)
        assert scales.stride() == (20 * groups, 1, 20), "columns start at multiples of 16 bytes"
        assert (compact_scales.shape, compact_scales.dtype) == ((PADDED * LOCAL, groups), dtype)
    assert (shapes.row_ids(5).shape, shapes.row_ids(5).dtype) == ((5,), torch.int64)
    assert (shapes.counts().shape, shapes.counts().dtype) == ((LOCAL,), torch.int32)
    assert (shapes.offsets().shape, shapes.offsets().dtype) == ((LOCAL + 1,), torch.int64)
    info, ranges = SHAPES.source_map()
    assert (info.shape, info.dtype) == ((LOCAL, PADDED), torch.int32)
    assert (ranges.shape, ranges.dtype) == ((LOCAL, RANKS), torch.int64)


def test_own_tensors_of_the_caller_are_accepted() -> None:
    SHAPES.check_recv(
        View.PADDED, {"out": SHAPES.padded(), "counts": SHAPES.counts(), "source_map": SHAPES.source_map()}
    )


@pytest.mark.parametrize(
    ("field", "view", "options"),
    [
        ("out, source_map", View.COMPACT, {"out": SHAPES.padded()}),
        ("out, source_map", View.INDEX, {"source_map": SHAPES.source_map()}),
        ("capacity", View.COMPACT, {"capacity": -1}),
        ("capacity", View.PADDED, {"capacity": 8}),
        ("most_tokens", View.PADDED, {"most_tokens": -1}),
        ("counts", View.PADDED, {"counts": torch.zeros(LOCAL, dtype=torch.int64)}),
        ("counts", View.PADDED, {"counts": torch.zeros(LOCAL + 1, dtype=torch.int32)}),
        ("wait_stats", View.PADDED, {"wait_stats": torch.zeros(RANKS, dtype=torch.int32)}),
        ("expert_stats", View.PADDED, {"expert_stats": torch.zeros(RANKS, dtype=torch.int32)}),
        ("src_info", View.PADDED, {"source_map": (torch.zeros(1), torch.zeros(1))}),
        ("out rows", View.PADDED, {"out": (torch.zeros(LOCAL, PADDED, HIDDEN), None)}),
        ("out scales", View.PADDED, {"out": (SHAPES.padded()[0], None)}),
        # Rows of scales, where the columns must be contiguous.
        (
            "out scales",
            View.PADDED,
            {"out": (SHAPES.padded()[0], torch.zeros(LOCAL, PADDED, HIDDEN // 128))},
        ),
    ],
)
def test_what_a_receive_refuses(field: str, view: View, options: RecvOptions) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SHAPES.check_recv(view, options)
    assert caught.value.field == field


# -- combine ------------------------------------------------------------------------------------------


def handle(*, weighted: bool, tokens: int = 4) -> Handle[None]:
    return Handle(SHAPES, tokens, weighted, None)


def test_weights_may_be_given_at_dispatch_or_combine() -> None:
    weights = torch.zeros(4, TOP_K)
    for given, late, reduction in (
        (handle(weighted=True), None, Reduction.RANK),
        (handle(weighted=False), weights, Reduction.RANK),
        (handle(weighted=False), weights, Reduction.SOURCE),
        (handle(weighted=False, tokens=0), None, Reduction.SOURCE),
    ):
        check_combine_weights(SPEC, CPU, given, late, reduction, pushes_weights=True)


@pytest.mark.parametrize(
    ("weighted", "weights", "reduction", "pushes"),
    [
        (True, torch.zeros(4, TOP_K), Reduction.RANK, True),
        (False, None, Reduction.RANK, True),
        (False, None, Reduction.SOURCE, True),
        (False, torch.zeros(5, TOP_K), Reduction.RANK, True),
        (False, torch.zeros(4, TOP_K, dtype=torch.float64), Reduction.RANK, True),
        (False, torch.zeros(4, TOP_K), Reduction.RANK, False),
    ],
)
def test_weights_come_once(
    weighted: bool, weights: torch.Tensor | None, reduction: Reduction, pushes: bool
) -> None:
    given = handle(weighted=weighted)
    with pytest.raises(InvalidArgument) as caught:
        check_combine_weights(SPEC, CPU, given, weights, reduction, pushes_weights=pushes)
    assert caught.value.field == "topk_weights"


def test_outputs_have_the_layout_of_their_view() -> None:
    padded = torch.zeros(LOCAL, PADDED, HIDDEN, dtype=torch.bfloat16)
    SHAPES.check_outputs(padded, View.PADDED, -1)
    for view in (View.COMPACT, View.INDEX):
        SHAPES.check_outputs(torch.zeros(5, HIDDEN, dtype=torch.bfloat16), view, 5)
    with pytest.raises(InvalidArgument, match="expert_out"):
        SHAPES.check_outputs(padded[:, 1:].contiguous(), View.PADDED, -1)
    with pytest.raises(InvalidArgument, match="expert_out"):
        SHAPES.check_outputs(padded, View.COMPACT, 5)


def test_handles_of_others_are_refused() -> None:
    empty = torch.empty(0)
    mine = handle(weighted=True)
    assert handle_of(Received(empty, empty, empty, mine), SHAPES) is mine
    for foreign, owner in (("of another exchange", SHAPES), (mine, object())):
        with pytest.raises(InvalidArgument, match=r"received\.handle"):
            handle_of(Received(empty, empty, empty, foreign), owner)


def test_modes_of_a_combine() -> None:
    every, by_source = frozenset(Wire), replace(SPEC, reduction=Reduction.SOURCE)
    assert combine_mode(SPEC, None, Wire.BF16, every) == (Reduction.RANK, Wire.BF16)
    assert combine_mode(by_source, None, Wire.BF16, every) == (Reduction.SOURCE, Wire.BF16)
    assert combine_mode(by_source, Reduction.RANK, "log10", every) == (Reduction.RANK, Wire.LOG10)
    with pytest.raises(InvalidArgument, match=r"reduction.*rank, as the spec says"):
        combine_mode(SPEC, Reduction.SOURCE, Wire.BF16, every)
    with pytest.raises(InvalidArgument, match=r"wire.*one of bf16, fp8, log10"):
        combine_mode(SPEC, None, "int8", every)
    with pytest.raises(InvalidArgument, match=r"wire = 'fp8': must be one of bf16"):
        combine_mode(SPEC, None, Wire.FP8, frozenset({Wire.BF16}))
    narrow = replace(SPEC, payload=Payload.BF16, hidden=200)
    for spec, wire in ((by_source, Wire.FP8), (narrow, Wire.LOG10)):
        with pytest.raises(InvalidArgument, match=r"wire.*hidden a multiple of 128"):
            combine_mode(spec, None, wire, every)


def test_bits_of_ranks() -> None:
    assert rank_bits(SPEC, []) == 0
    assert rank_bits(SPEC, (0, 2)) == 0b101
    for rank in (-1, SPEC.rank, RANKS):
        with pytest.raises(InvalidArgument, match=r"ranks.*0 to 2, not this rank"):
            rank_bits(SPEC, [rank])
