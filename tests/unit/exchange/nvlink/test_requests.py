"""What the exchange on GPUs refuses and allocates, on tensors of the CPU: none of it asks a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_server.errors import ConfigError, InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Payload, Received, Reduction, View

pytest.importorskip("ep_server._cuda", reason="built without nvcc")

from ep_server.exchange.nvlink.requests import CombineMode, Handle, Receipt, Wire
from ep_server.exchange.nvlink.shapes import (
    Shapes,
    bits_of,
    check_answer,
    check_device_spec,
    check_dispatch,
    check_num_sms,
    choose,
    combine_mode,
)

CPU = torch.device("cpu")
TOKENS, HIDDEN, TOP_K, RANKS, LOCAL = 6, 640, 2, 3, 2
SPEC = ExchangeSpec(1, RANKS, (0, 1, 2, 1), TOKENS, HIDDEN, TOP_K, Payload.FP8, num_banks=2)
PADDED = RANKS * TOKENS  # 18: a scale column is padded to 20 words
SHAPES = Shapes(SPEC, CPU)


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


def test_multiprocessors() -> None:
    assert [check_num_sms(asked, 132) for asked in (0, 1, 132)] == [132, 1, 132]
    for asked in (-1, 133):
        with pytest.raises(ConfigError, match=r"num_sms.*0 to 132"):
            check_num_sms(asked, 132)


# -- dispatch -----------------------------------------------------------------------------------------


def test_a_dispatch_that_fits() -> None:
    assert check_dispatch(SHAPES, *inputs()) == 4
    assert check_dispatch(SHAPES, *inputs(0)) == 0
    x, ids, _ = inputs(TOKENS)
    assert check_dispatch(SHAPES, x, ids, None) == TOKENS


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
        check_dispatch(SHAPES, given[0], given[1], given[2])
    assert caught.value.field == field


# -- what a receive fills -----------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [Payload.BF16, Payload.FP8, Payload.FP8_UE8M0])
def test_tensors_of_each_view(payload: Payload) -> None:
    shapes = Shapes(replace(SPEC, payload=payload, hidden=1024), CPU)
    fp8, ue8m0 = payload != Payload.BF16, payload == Payload.FP8_UE8M0
    groups, dtype = (2, torch.int32) if ue8m0 else (8, torch.float32)
    row_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16

    padded = shapes.recv_tensors(Receipt(View.PADDED))
    assert (padded.rows.shape, padded.rows.dtype) == ((LOCAL, PADDED, 1024), row_dtype)
    compact = shapes.recv_tensors(Receipt(View.COMPACT))
    assert (compact.rows.shape, compact.rows.dtype) == ((PADDED * LOCAL, 1024), row_dtype)
    assert compact.limit == PADDED * LOCAL
    assert (padded.scales is not None, compact.scales is not None) == (fp8, fp8)
    if padded.scales is not None and compact.scales is not None:
        assert (padded.scales.shape, padded.scales.dtype) == ((LOCAL, PADDED, groups), dtype)
        assert padded.scales.stride() == (20 * groups, 1, 20), "columns start at multiples of 16 bytes"
        assert (compact.scales.shape, compact.scales.dtype) == ((PADDED * LOCAL, groups), dtype)

    index = shapes.recv_tensors(Receipt(View.INDEX, capacity=5))
    assert index.row_ids is not None
    assert (index.row_ids.shape, index.row_ids.dtype, index.limit) == ((5,), torch.int64, 5)
    for made in (padded, compact, index):
        assert (made.counts.shape, made.counts.dtype) == ((LOCAL,), torch.int32)
        assert (made.offsets.shape, made.offsets.dtype) == ((LOCAL + 1,), torch.int64)


def test_what_the_caller_gives_is_filled() -> None:
    out, counts = SHAPES.empty_padded(), torch.empty(LOCAL, dtype=torch.int32)
    filled = SHAPES.recv_tensors(Receipt(View.PADDED, out=out, counts=counts))
    assert filled.rows is out[0]
    assert filled.scales is out[1]
    assert filled.counts is counts
    info, ranges = SHAPES.source_map()
    assert (info.shape, info.dtype) == ((LOCAL, PADDED), torch.int32)
    assert (ranges.shape, ranges.dtype) == ((LOCAL, RANKS), torch.int64)


@pytest.mark.parametrize(
    ("field", "receipt"),
    [
        ("out, source_map", Receipt(View.COMPACT, out=SHAPES.empty_padded())),
        ("out, source_map", Receipt(View.INDEX, source_map=True)),
        ("capacity", Receipt(View.COMPACT, capacity=-1)),
        ("capacity", Receipt(View.PADDED, capacity=8)),
        ("counts", Receipt(View.PADDED, counts=torch.zeros(LOCAL, dtype=torch.int64))),
        ("counts", Receipt(View.PADDED, counts=torch.zeros(LOCAL + 1, dtype=torch.int32))),
        ("out rows", Receipt(View.PADDED, out=(torch.zeros(LOCAL, PADDED, HIDDEN), None))),
        ("out scales", Receipt(View.PADDED, out=(SHAPES.empty_padded()[0], None))),
        (
            "out scales",  # rows of scales, where the columns must be contiguous
            Receipt(View.PADDED, out=(SHAPES.empty_padded()[0], torch.zeros(LOCAL, PADDED, HIDDEN // 128))),
        ),
    ],
)
def test_what_a_receive_refuses(field: str, receipt: Receipt) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SHAPES.recv_tensors(receipt)
    assert caught.value.field == field


def test_a_view_that_does_not_exist() -> None:
    assert choose("view", View, "index") is View.INDEX
    with pytest.raises(InvalidArgument, match=r"view.*one of compact, padded, index"):
        choose("view", View, "sparse")


# -- combine ------------------------------------------------------------------------------------------


def received(*, weighted: bool, view: View = View.PADDED, rows: int = -1, tokens: int = 4) -> Received:
    handle = Handle(torch.empty(0), tokens, weighted, tokens, rows)
    return Received(torch.empty(0), torch.empty(0), torch.empty(0), handle, view)


def answers() -> torch.Tensor:
    return torch.zeros(LOCAL, PADDED, HIDDEN, dtype=torch.bfloat16)


RANK = CombineMode(Reduction.RANK, Wire.BF16)
SOURCE = CombineMode(Reduction.SOURCE, Wire.BF16)


def test_answers_that_fit() -> None:
    weights = torch.zeros(4, TOP_K)
    assert check_answer(SHAPES, answers(), received(weighted=True), None, RANK).tokens == 4
    assert check_answer(SHAPES, answers(), received(weighted=False), weights, RANK).tokens == 4
    nothing = received(weighted=False, tokens=0)
    assert check_answer(SHAPES, answers(), nothing, None, SOURCE).tokens == 0
    compact = torch.zeros(5, HIDDEN, dtype=torch.bfloat16)
    for view in (View.COMPACT, View.INDEX):
        given = received(weighted=True, view=view, rows=5)
        assert check_answer(SHAPES, compact, given, None, RANK) is given.handle


@pytest.mark.parametrize(
    ("field", "weighted", "weights", "mode"),
    [
        ("topk_weights", True, torch.zeros(4, TOP_K), RANK),
        ("topk_weights", False, None, RANK),
        ("topk_weights", False, None, SOURCE),
        ("topk_weights", False, torch.zeros(5, TOP_K), RANK),
        ("topk_weights", False, torch.zeros(4, TOP_K, dtype=torch.float64), RANK),
    ],
)
def test_weights_come_once(
    field: str, weighted: bool, weights: torch.Tensor | None, mode: CombineMode
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_answer(SHAPES, answers(), received(weighted=weighted), weights, mode)
    assert caught.value.field == field


def test_answers_that_are_not_of_the_dispatch() -> None:
    with pytest.raises(InvalidArgument, match="expert_out"):
        check_answer(SHAPES, answers()[:, 1:].contiguous(), received(weighted=True), None, RANK)
    with pytest.raises(InvalidArgument, match="expert_out"):
        check_answer(SHAPES, answers(), received(weighted=True, view=View.COMPACT, rows=5), None, RANK)
    foreign = replace(received(weighted=True), handle="of another exchange")
    with pytest.raises(InvalidArgument, match=r"received\.handle"):
        check_answer(SHAPES, answers(), foreign, None, RANK)
    answered = replace(Handle(torch.empty(0), 4, True, 4), answering=True)
    with pytest.raises(InvalidArgument, match=r"received\.handle.*one at a time"):
        check_answer(SHAPES, answers(), replace(received(weighted=True), handle=answered), None, RANK)


def test_modes_of_a_combine() -> None:
    by_source = replace(SPEC, reduction=Reduction.SOURCE)
    assert combine_mode(SPEC, None, "bf16") == RANK
    assert combine_mode(by_source, None, Wire.BF16) == SOURCE
    assert combine_mode(by_source, Reduction.RANK, "log10") == CombineMode(Reduction.RANK, Wire.LOG10)
    with pytest.raises(InvalidArgument, match=r"reduction.*rank, as the spec says"):
        combine_mode(SPEC, Reduction.SOURCE, "bf16")
    with pytest.raises(InvalidArgument, match=r"wire.*one of bf16, fp8, log10"):
        combine_mode(SPEC, None, "int8")
    narrow = replace(SPEC, payload=Payload.BF16, hidden=200)
    for spec, wire in ((by_source, "fp8"), (narrow, "log10")):
        with pytest.raises(InvalidArgument, match=r"wire.*hidden a multiple of 128"):
            combine_mode(spec, None, wire)


def test_bits_of_ranks() -> None:
    assert bits_of(SPEC, []) == 0
    assert bits_of(SPEC, (0, 2)) == 0b101
    for rank in (-1, RANKS):
        with pytest.raises(InvalidArgument, match=r"ranks.*0 to 2"):
            bits_of(SPEC, [rank])
