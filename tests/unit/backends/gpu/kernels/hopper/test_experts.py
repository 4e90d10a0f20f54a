"""Which rows and weights the experts' kernel for Hopper is for; what it computes needs one (tests/gpu)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_server.backends.gpu import capability
from ep_server.backends.gpu.kernels.hopper.experts import (
    HopperExperts,
    Tile,
    fits,
    hopper_fits,
    narrow_tile,
    reads_ahead,
    wide_tile,
)
from ep_server.backends.gpu.kernels.triton.expert_rows import ExpertRows, ExpertWeights
from ep_server.errors import InternalError

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
        Experts=lambda **given: SimpleNamespace(
            scratch_bytes=lambda most: 16 * most,
            run=lambda stream, given, **manner: work.append({**given, "manner": manner}),
            wide=lambda: given["gate_up_scale"] == 0,
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
    assert narrow_tile(each) == Tile(rows)


def test_weights_are_prefetched_if_few_experts_have_no_rows() -> None:
    assert [reads_ahead(each) for each in (0, 2, 3, 102)] == [False, False, True, True]


def test_weights_of_several_tiles_of_rows_are_not_read_ahead() -> None:
    """Which tile of weights a block begins with is not known before."""
    assert not reads_ahead(103)
    assert [reads_ahead(each, 96) for each in (74, 75)] == [True, False]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_kernel_without_a_gpu(device: str) -> None:
    gate_up = torch.empty(2, 256, 256, dtype=torch.bfloat16, device=device)
    assert not hopper_fits(
        ExpertWeights(gate_up, torch.empty(2, 256, 128, dtype=torch.bfloat16, device=device))
    )


def test_sizes_that_no_tile_fits() -> None:
    """A rank without experts begins all the same, with the other kernels."""
    assert [fits(weights_of(*sizes)) for sizes in ((1,), (0,), (513, 128, 64))] == [True, False, False]
    assert [fits(weights_of(2, *sizes)) for sizes in ((192, 128), (256, 96))] == [False, False]


def test_scales_must_be_of_whole_blocks() -> None:
    assert [fits(weights_of(2, 256, ffn, FP8)) for ffn in (128, 192)] == [True, False]


@pytest.mark.parametrize(
    ("dtype", "each", "tile", "ahead"),
    [
        (BF16, 100, Tile(128), True),
        (BF16, 101, Tile(128), True),  # of two experts there are few tiles of weights
        (BF16, 7_600, Tile(160, wide=True), False),
        (BF16, 5_000_000, Tile(192, wide=True), False),
        (FP8, 60, Tile(96), True),
        (FP8, 100, Tile(96), False),
    ],
    ids=str,
)
def test_a_kernel_is_told_its_tile_and_whether_to_read_ahead(
    dtype: torch.dtype, each: int, tile: Tile, ahead: bool, told: list[dict[str, Any]]
) -> None:
    scratch, out = torch.zeros(80, dtype=torch.uint8), torch.zeros(5, 256, dtype=BF16)
    hopper = HopperExperts(weights_of(2, dtype=dtype))
    hopper.run(index_rows(), scratch, out, rows_per_expert=each)
    assert [work["manner"] for work in told] == [
        {"rows_of_tile": tile.rows, "wide": tile.wide, "reads_ahead": ahead}
    ]
    assert hopper.reads_ahead(each) == ahead


@pytest.mark.parametrize(
    ("each", "down_tiles", "rows"),
    [
        (100, 1024, 160),
        (512, 256, 192),
        (256, 32, 96),
        (128, 32, None),  # Mixtral's two experts of a rank
        (300, 48, 160),
        (150, 64, 128),
        (1024, 32, 192),
        (600, 1024, 160),  # four chunks of an expert either way
    ],
)
def test_wide_tiles_read_least_and_fill_the_gpu(each: int, down_tiles: int, rows: int | None) -> None:
    assert wide_tile(each, down_tiles) == (rows and Tile(rows, wide=True))


@pytest.mark.parametrize(("dtype", "all_rows"), [(BF16, True), (FP8, False)], ids=str)
def test_many_rows_by_codes_are_for_the_other_kernels(
    dtype: torch.dtype, all_rows: bool, told: list[dict[str, Any]]
) -> None:
    hopper = HopperExperts(weights_of(2, dtype=dtype))
    assert [hopper.takes(index_rows(), each) for each in (512, 513)] == [True, all_rows]
    assert not told


def test_a_kernel_is_told_what_there_is_room_for(told: list[dict[str, Any]]) -> None:
    scratch, out = torch.zeros(80, dtype=torch.uint8), torch.zeros(5, 256, dtype=BF16)
    HopperExperts(weights_of(2)).run(index_rows(), scratch, out, rows_per_expert=3)
    assert [(work["most"], work["held"]) for work in told] == [(5, 40)]


@pytest.mark.parametrize("name", ["scratch", "out", "counts", "offsets", "rows"])
def test_wrong_shape_is_refused_by_name_before_launch(name: str, told: list[dict[str, Any]]) -> None:
    given, room = (
        index_rows(),
        {"scratch": torch.zeros(80, dtype=torch.uint8), "out": torch.zeros(5, 256, dtype=BF16)},
    )
    if name in room:
        room[name] = room[name][1:]
    else:
        given = replace(given, **{name: getattr(given, name)[..., 1:]})
    with pytest.raises(InternalError, match=f"^{name}: "):
        HopperExperts(weights_of(2)).run(given, **room, rows_per_expert=3)
    assert not told


def test_weights_that_do_not_lie_side_by_side_are_refused(told: list[dict[str, Any]]) -> None:
    weights = weights_of(2)
    with pytest.raises(InternalError, match=r"^down: .*strides"):
        HopperExperts(replace(weights, down=weights.down.transpose(1, 2).contiguous().transpose(1, 2)))
