"""A layer of experts on a Hopper GPU, what must come of it, and room for it; see test_hopper_experts.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from ep_server.backends.gpu.kernels.hopper.experts import HopperExperts, hopper_fits
from ep_server.backends.gpu.kernels.triton.expert_rows import ExpertRows, ExpertWeights
from ep_server.models.loading import widen

BF16, FP8, BLOCK, SPARE = torch.bfloat16, torch.float8_e4m3fn, (128, 128), 9


@dataclass(frozen=True)
class Layer:
    """Weights, rows by expert, and what comes of them in float32: with BF16 weights rounded once between."""

    weights: ExpertWeights
    counts: list[int]
    rows: torch.Tensor

    @staticmethod
    def of(size: tuple[int, int, int], counts: list[int], *, codes: bool = False) -> Layer:
        experts, width, ffn = size
        rows = torch.randn(sum(counts), width, device="cuda").to(BF16)
        if codes:
            return Layer(in_codes(experts, width, ffn), counts, rows)
        gate_up = torch.randn(experts, 2 * ffn, width, device="cuda") * width**-0.5
        down = torch.randn(experts, width, ffn, device="cuda") * ffn**-0.5
        return Layer(ExpertWeights(gate_up.to(BF16), down.to(BF16)), counts, rows)

    def given(self) -> ExpertRows:
        """With room for more rows than come."""
        counts = torch.tensor(self.counts, device="cuda")
        rows = F.pad(self.rows, (0, 0, 0, SPARE), value=float("nan"))
        return ExpertRows(rows, counts.int(), F.pad(counts.cumsum(0), (1, 0)))

    def expected(self) -> torch.Tensor:
        found, w = [], self.weights
        gate_up, down = w.gate_up, w.down
        if w.gate_up_scale is not None and w.down_scale is not None:
            gate_up, down = widen(gate_up, w.gate_up_scale, BLOCK), widen(down, w.down_scale, BLOCK)
        for e, rows in enumerate(self.rows.split(self.counts)):
            gate, up = (rows.float() @ gate_up[e].float().T).chunk(2, dim=-1)
            hidden = F.silu(gate) * up
            hidden = hidden if w.fp8 else hidden.to(BF16).float()
            found.append(hidden @ down[e].float().T)
        return torch.cat(found)

    def room(self, experts: HopperExperts) -> tuple[torch.Tensor, torch.Tensor]:
        """scratch and out, poisoned: bytes of ones are NaN in every format."""
        most = len(self.rows) + SPARE
        width = self.weights.down.shape[1]
        return (
            torch.full((experts.scratch_bytes(most),), 255, device="cuda", dtype=torch.uint8),
            torch.full((most, width), float("nan"), device="cuda", dtype=BF16),
        )


def in_codes(experts: int, width: int, ffn: int) -> ExpertWeights:
    """Every code but NaN, and scales that differ from block to block by up to 8."""
    made = []
    for rows, columns in ((2 * ffn, width), (width, ffn)):
        every = torch.arange(254, device="cuda", dtype=torch.uint8)
        every = torch.where(every < 127, every, every + 1)  # 127 and 255 are NaN
        codes = every[torch.randint(254, (experts, rows, columns), device="cuda")].view(FP8)
        scale = 2.0 ** (3 * torch.rand(experts, rows // 128, columns // 128, device="cuda"))
        made.append((codes, scale * columns**-0.5 / 200))
    (gate_up, gate_up_scale), (down, down_scale) = made
    return ExpertWeights(gate_up, down, gate_up_scale, down_scale)


def check(layer: Layer, out: torch.Tensor) -> None:
    """What is rounded to BF16 once alone is off by 1.66e-3 of the norm."""
    found, expected = out[: len(layer.rows)].float(), layer.expected()
    assert out[len(layer.rows) :].isnan().all()
    if found.numel() == 0:
        return
    off = 4e-2 if layer.weights.fp8 else 2e-2  # tensor cores keep 14 bits of sums of codes
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=off * float(expected.std()))
    assert float((found - expected).norm() / expected.norm()) < 2.2e-3


def hopper(layer: Layer) -> HopperExperts:
    if not hopper_fits(layer.weights):
        pytest.skip("the kernel is for Hopper")
    return HopperExperts(layer.weights)
