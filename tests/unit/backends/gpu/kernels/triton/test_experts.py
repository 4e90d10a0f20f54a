"""Against float64, expert by expert, through every view of a receive; what no row came for is NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.expert_rows import (
    GROUP,
    ExpertRows,
    ExpertWeights,
    Tiles,
    tiles_for,
)
from ep_server.backends.gpu.kernels.triton.experts import run_experts
from ep_server.errors import InternalError
from ep_server.exchange.api import Payload, Received, View
from ep_server.exchange.quant import dequantise, quantise
from tests.support.triton.harness import DEVICE, FP8, NAN, assert_near, random

COUNTS = ([3, 0, 0, 21, 1], [0, 0, 0], [40])
F32, BF16 = torch.float32, torch.bfloat16


@dataclass
class Matrix:
    """codes with a scale per 128 x 128 block where `scale` is given; `exact`: what they read as, float64."""

    codes: torch.Tensor
    scale: torch.Tensor | None
    exact: torch.Tensor


def matrix(experts: int, out: int, width: int, dtype: torch.dtype, seed: int) -> Matrix:
    values = random(experts, out, width, seed=seed, scale=width**-0.5)
    if dtype is not FP8:
        values = values.to(dtype)
        return Matrix(values, None, values.double())
    scale = 0.002 + 0.01 * torch.rand(experts, -(-out // GROUP), -(-width // GROUP), device=DEVICE)
    spread = scale.repeat_interleave(GROUP, 1)[:, :out].repeat_interleave(GROUP, 2)[:, :, :width]
    values = (values / spread).clamp(-448, 448).to(FP8)
    return Matrix(values, scale, values.double() * spread.double())


@dataclass
class Case:
    """rows: per expert, as the experts read them, float64."""

    given: ExpertRows
    weights: ExpertWeights
    gate: Matrix
    up: Matrix
    down: Matrix
    rows: list[torch.Tensor]
    dtype: torch.dtype

    @staticmethod
    def of(
        counts: list[int], hidden: int, ffn: int, kinds: tuple[torch.dtype, torch.dtype], view: View
    ) -> Case:
        row_dtype, weight_dtype = kinds
        experts, dtype = len(counts), BF16 if weight_dtype is FP8 else weight_dtype
        gate, up = (matrix(experts, ffn, hidden, weight_dtype, seed) for seed in (1, 2))
        down = matrix(experts, hidden, ffn, weight_dtype, 3)
        fused = torch.cat([gate.codes.float(), up.codes.float()], 1).to(weight_dtype)
        scales = None if gate.scale is None else torch.cat([gate.scale, up.scale], 1).contiguous()
        total = sum(counts)
        x = random(total, hidden, dtype=BF16 if row_dtype is FP8 else row_dtype, seed=4)
        codes, row_scales = quantise(x, Payload.FP8) if row_dtype is FP8 else (x, None)
        exact = x.double() if row_scales is None else dequantise(codes, row_scales).double()
        if row_scales is not None and weight_dtype is not FP8:
            exact = exact.to(dtype).double()  # as the CPU engine hands them to its experts
        given = laid_out(codes, row_scales, counts, view)
        return Case(
            given, ExpertWeights(fused, down.codes, scales, down.scale), gate, up, down,
            list(exact.split(counts)), dtype,
        )  # fmt: skip

    def run(self, **options: int) -> list[torch.Tensor]:
        """What each expert answered; checks that nothing else was written."""
        given = self.given
        hidden = torch.full((given.most, self.down.exact.shape[2]), NAN, dtype=self.dtype, device=DEVICE)
        shape = given.rows.shape[:-1] if given.row_ids is None else given.row_ids.shape
        out = torch.full((*shape, self.down.exact.shape[1]), NAN, dtype=self.dtype, device=DEVICE)
        run_experts(given, self.weights, hidden, out, **options)
        flat = out.flatten(0, -2)
        room = given.padded
        counts = given.counts.tolist()
        starts = [e * room for e in range(len(counts))] if room else given.offsets.tolist()
        answers = [flat[a : a + n].clone() for a, n in zip(starts, counts, strict=False)]
        for a, n in zip(starts, counts, strict=False):
            flat[a : a + n] = NAN
        assert bool(flat.isnan().all())
        return answers

    def oracle(self, e: int) -> torch.Tensor:
        gate, up = self.rows[e] @ self.gate.exact[e].t(), self.rows[e] @ self.up.exact[e].t()
        gated = (torch.nn.functional.silu(gate) * up).to(self.dtype).double()
        return gated @ self.down.exact[e].t()


def laid_out(codes: torch.Tensor, scales: torch.Tensor | None, counts: list[int], view: View) -> ExpertRows:
    """Rows in a view, with room that holds NaN: rows behind the last, rows of other tokens, wild row ids."""
    offsets = torch.tensor([0, *accumulate(counts)], device=DEVICE)
    number = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    room = len(codes) + 5
    if view is View.PADDED:
        most = max(counts) + 3
        rows = filled((len(counts), most, codes.shape[1]), codes.dtype)
        plane = None if scales is None else filled((len(counts), scales.shape[1], most + 1), torch.float32)
        by_column = None if plane is None else plane.transpose(1, 2)[:, :most]
        for e, (a, b) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            rows[e, : b - a] = codes[a:b]
            if scales is not None:
                by_column[e, : b - a] = scales[a:b]
        return ExpertRows(rows, number, torch.full_like(offsets, -1), by_column)
    place = torch.arange(len(codes), device=DEVICE)
    row_ids = None
    if view is View.INDEX:
        place = torch.randperm(room, generator=torch.Generator().manual_seed(5)).to(DEVICE)[: len(codes)]
        row_ids = torch.full((room,), 1 << 40, device=DEVICE)
        row_ids[: len(codes)] = place
    pitch = codes.shape[1] + 16 * (view is View.INDEX)  # rows that lie where they arrived have one
    rows, spread = filled((room, pitch), codes.dtype)[:, : codes.shape[1]], None
    rows[place] = codes
    if scales is not None:
        spread = filled((room, scales.shape[1]), torch.float32)
        spread[place] = scales
    return ExpertRows(rows, number, offsets, spread, row_ids)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, NAN, device=DEVICE).to(dtype)


KINDS = {
    "float32": (F32, F32),
    "bfloat16": (BF16, BF16),
    "fp8-rows": (FP8, BF16),
    "fp8-weights": (BF16, FP8),
    "fp8-both": (FP8, FP8),
}


@pytest.mark.parametrize("view", list(View))
@pytest.mark.parametrize("kinds", KINDS)
def test_every_view_and_format(kinds: str, view: View) -> None:
    """Experts without rows, one with more than a tile, an FFN that is no multiple of a block."""
    sizes = (256, 152) if FP8 in KINDS[kinds] else (72, 40)
    case = Case.of(COUNTS[0], *sizes, KINDS[kinds], view)
    for e, answer in enumerate(case.run()):
        assert_near(answer, case.oracle(e), 8)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("hidden", "ffn"), [(33, 20), (130, 1), (64, 96)])
def test_odd_sizes(counts: list[int], hidden: int, ffn: int) -> None:
    case = Case.of(counts, hidden, ffn, (F32, F32), View.COMPACT)
    for e, answer in enumerate(case.run()):
        assert_near(answer, case.oracle(e), 8)


@pytest.mark.parametrize("rows_per_expert", [1, 32, 64, 500])
def test_every_tile_table_computes_any_count(rows_per_expert: int) -> None:
    case = Case.of([70, 0, 2], 72, 24, (BF16, BF16), View.COMPACT)
    for e, answer in enumerate(case.run(rows_per_expert=rows_per_expert)):
        assert_near(answer, case.oracle(e), 8)


@pytest.mark.parametrize("kinds", ["float32", "fp8-both"])
def test_a_row_number_that_is_none_leads_nowhere(kinds: str) -> None:
    """As of rows that were lost after their header had come: they read zeros, the others are what they were.

    SideStream the rows lie NaN, and numbers far out would end the process.
    """
    sizes = (256, 152) if FP8 in KINDS[kinds] else (72, 40)
    case = Case.of(COUNTS[0], *sizes, KINDS[kinds], View.INDEX)
    whole, lost, held = torch.cat(case.run()), [1, 4, 9, 24], len(case.given.rows)
    assert case.given.row_ids is not None
    case.given.row_ids[lost] = torch.tensor([-1, held, 1 << 60, -(1 << 62)], device=DEVICE)
    found = torch.cat(case.run())
    assert bool((found[lost] == 0).all())
    kept = [n for n in range(len(whole)) if n not in lost]
    assert torch.equal(found[kept], whole[kept])


def test_a_row_does_not_depend_on_the_others() -> None:
    """The same bits in another batch, for the same tiles."""
    case = Case.of([5, 3], 64, 32, (BF16, BF16), View.COMPACT)
    whole = case.run()
    case.given.counts[:] = torch.tensor([0, 1])
    case.given.offsets[:] = torch.tensor([0, 7, 8])
    assert torch.equal(case.run()[1], whole[1][2:3])


def test_few_programs_take_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(rows_per_expert: int, **kind: Any) -> Tiles:
        return replace(tiles_for(rows_per_expert, **kind), resident=1)

    monkeypatch.setattr("ep_server.backends.gpu.kernels.triton.expert_rows._MULTIPROCESSORS", 2)
    monkeypatch.setattr("ep_server.backends.gpu.kernels.triton.experts.tiles_for", few)
    case = Case.of(COUNTS[0], 64, 72, (F32, F32), View.COMPACT)
    for e, answer in enumerate(case.run()):
        assert_near(answer, case.oracle(e), 8)


@pytest.mark.parametrize("room", [0, 1, 64])
def test_a_rank_without_experts(room: int) -> None:
    """As with fewer experts than ranks: there is room for rows, and none comes."""
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    offsets, ids = (torch.zeros(n, dtype=torch.int64, device=DEVICE) for n in (1, room))
    given = ExpertRows(filled((room, 32), F32), none, offsets, row_ids=ids)
    weights = ExpertWeights(*(torch.zeros(0, *shape, device=DEVICE) for shape in ((32, 32), (32, 16))))
    hidden, out = filled((room, 16), F32), filled((room, 32), F32)
    run_experts(given, weights, hidden, out)
    assert hidden.isnan().all() and out.isnan().all()


def test_of_a_receive() -> None:
    x = random(4, 8)
    counts, offsets = torch.tensor([4], dtype=torch.int32), torch.tensor([0, 4])
    given = ExpertRows.of(Received(x, counts, offsets, None))
    assert given.rows is x and given.padded == 0 and given.most == 4
    with pytest.raises(InternalError, match="row_ids"):
        ExpertRows.of(Received(x, counts, offsets, None, View.INDEX))


def test_wrong_inputs_are_named() -> None:
    case = Case.of([2, 1], 64, 32, (BF16, BF16), View.COMPACT)
    hidden, out = random(8, 32, dtype=BF16), random(8, 64, dtype=BF16)
    for wrong, name in (
        ({"rows": random(8, 65, dtype=BF16)}, "rows"),
        ({"rows": random(8, 64)}, "rows"),
        ({"counts": torch.tensor([1, 2])}, "counts"),
        ({"offsets": torch.tensor([0, 2])}, "offsets"),
        ({"scales": random(8, 1)}, "scales"),
    ):
        with pytest.raises(InternalError, match=name):
            run_experts(replace(case.given, **wrong), case.weights, hidden, out)
    with pytest.raises(InternalError, match="hidden"):
        run_experts(case.given, case.weights, hidden[:7], out)
    with pytest.raises(InternalError, match="gate_up_scale"):
        scaled = replace(case.weights, gate_up=case.weights.gate_up.to(FP8), down=case.weights.down.to(FP8))
        run_experts(case.given, scaled, hidden, out)
