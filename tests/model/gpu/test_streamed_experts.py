"""Which rows and weights the experts' kernel for Hopper is for; what it computes needs one (tests/gpu)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_server.errors import InternalError
from ep_server.model.gpu import capability
from ep_server.model.gpu.streamed_experts import (
    StreamedExperts,
    fits,
    reads_ahead,
    rows_of_tile,
    streamable,
)
from ep_server.model.triton.expert_rows import ExpertRows, ExpertWeights

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def weights_of(experts: int, width: int = 256, ffn: int = 128, dtype: torch.dtype = BF16) -> ExpertWeights:
    gate_up = torch.zeros(experts, 2 * ffn, width).to(dtype)
    down = torch.zeros(experts, width, ffn).to(dtype)
    if dtype is BF16:
        return ExpertWeights(gate_up, down)
    wide, deep = -(-width // 128), -(-ffn // 128)
    scales = torch.ones(experts, 2 * deep, wide), torch.ones(experts, wide, deep)
    return ExpertWeights(gate_up, down, *scales)


def index_rows(most: int = 5, held: int = 40) -> ExpertRows:
    """Of two experts."""
    counts, offsets = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    rows = torch.zeros(held, 256, dtype=BF16)
    return ExpertRows(rows, counts, offsets, row_ids=torch.zeros(most, dtype=torch.int64))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a kernel is told, in place of one."""
    work: list[dict[str, Any]] = []
    native = SimpleNamespace(
        Experts=lambda **_: SimpleNamespace(
            scratch_bytes=lambda most: 16 * most,
            run=lambda stream, given, *manner: work.append({**given, "manner": manner}),
        ),
        ExpertsWork=lambda **given: given,
    )
    monkeypatch.setattr(capability, "import_module", lambda _: native)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    return work


@pytest.mark.parametrize(
    ("each", "rows"),
    [
        (0, 32),
        (1, 32),
        (20, 32),
        (21, 48),
        (33, 48),
        (34, 64),
        (46, 64),
        (47, 96),
        (74, 96),
        (75, 128),
        (500, 128),
    ],
)
def test_tiles_have_room_for_what_chance_puts_beyond_the_mean(each: int, rows: int) -> None:
    assert rows_of_tile(each) == rows


def test_weights_are_read_ahead_where_few_experts_are_without_rows() -> None:
    assert [reads_ahead(each) for each in (0, 2, 3, 102)] == [False, False, True, True]


def test_weights_of_several_tiles_of_rows_are_not_read_ahead() -> None:
    """Which tile of weights a block begins with is not known before."""
    assert not reads_ahead(103)
    assert [reads_ahead(each, 96) for each in (74, 75)] == [True, False]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_kernel_without_a_gpu(device: str) -> None:
    gate_up = torch.empty(2, 256, 256, dtype=torch.bfloat16, device=device)
    assert not streamable(
        ExpertWeights(gate_up, torch.empty(2, 256, 128, dtype=torch.bfloat16, device=device))
    )


def test_sizes_that_no_tile_fits() -> None:
    """A rank without experts begins all the same, with the other kernels."""
    assert [fits(weights_of(*sizes)) for sizes in ((1,), (0,), (513, 128, 64))] == [True, False, False]
    assert [fits(weights_of(2, *sizes)) for sizes in ((192, 128), (256, 96))] == [False, False]


def test_scales_must_be_of_whole_blocks() -> None:
    assert [fits(weights_of(2, 256, ffn, FP8)) for ffn in (128, 192)] == [True, False]


@pytest.mark.parametrize(("dtype", "rows"), [(BF16, 128), (FP8, 96)], ids=str)
def test_codes_have_smaller_tiles_at_most_and_are_not_read_ahead_for_two(
    dtype: torch.dtype, rows: int, told: list[dict[str, Any]]
) -> None:
    scratch, out = torch.zeros(80, dtype=torch.uint8), torch.zeros(5, 256, dtype=BF16)
    StreamedExperts(weights_of(2, dtype=dtype)).run(index_rows(), scratch, out, rows_per_expert=100)
    assert [work["manner"] for work in told] == [(rows, rows == 128)]


def test_a_kernel_is_told_what_there_is_room_for(told: list[dict[str, Any]]) -> None:
    scratch, out = torch.zeros(80, dtype=torch.uint8), torch.zeros(5, 256, dtype=BF16)
    StreamedExperts(weights_of(2)).run(index_rows(), scratch, out, rows_per_expert=3)
    assert [(work["most"], work["held"]) for work in told] == [(5, 40)]


@pytest.mark.parametrize("name", ["scratch", "out", "counts", "offsets", "rows"])
def test_another_shape_is_refused_by_name_before_a_kernel_sees_it(
    name: str, told: list[dict[str, Any]]
) -> None:
    given, room = (
        index_rows(),
        {"scratch": torch.zeros(80, dtype=torch.uint8), "out": torch.zeros(5, 256, dtype=BF16)},
    )
    if name in room:
        room[name] = room[name][1:]
    else:
        given = replace(given, **{name: getattr(given, name)[..., 1:]})
    with pytest.raises(InternalError, match=f"^{name}: "):
        StreamedExperts(weights_of(2)).run(given, **room, rows_per_expert=3)
    assert not told


def test_weights_that_do_not_lie_side_by_side_are_refused(told: list[dict[str, Any]]) -> None:
    weights = weights_of(2)
    with pytest.raises(InternalError, match=r"^down: .*strides"):
        StreamedExperts(replace(weights, down=weights.down.transpose(1, 2).contiguous().transpose(1, 2)))
