"""What only weights in codes have: rows that are split, or codes too. The rest: test_hopper_experts.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.support.gpu.experts_case import BF16, FP8, SPARE, Layer, check, hopper

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("each", [1, 45, 128])
@pytest.mark.parametrize("by_column", [False, True])
def test_rows_in_codes(by_column: bool, each: int) -> None:
    """Read where they lie; scales lie in either order, and low codes of launches before are gone."""
    torch.manual_seed(11)
    layer = Layer.of((16, 512, 256), [n * 5 % 70 for n in range(16)], codes=True)
    experts, count = hopper(layer), len(layer.rows)
    blocks = layer.rows.float().view(count, 4, 128)
    scales = blocks.abs().amax(-1) / 448
    codes = (blocks / scales[..., None]).to(FP8)
    ids = torch.randperm(count + 30, device="cuda")[:count]
    held = torch.full((count + 30, 512 + 64), 127, device="cuda", dtype=torch.uint8)
    held[ids, :512] = codes.view(count, 512).view(torch.uint8)
    held_scales = torch.full((count + 30, 4), float("nan"), device="cuda")
    held_scales[ids] = scales
    if by_column:
        held_scales = held_scales.T.contiguous().T
    given = replace(
        layer.given(), rows=held.view(FP8)[:, :512], scales=held_scales, row_ids=F.pad(ids, (0, SPARE))
    )
    assert experts.takes(given, each)
    scratch, out = layer.room(experts)
    for _ in range(2):
        experts.run(given, scratch, out, rows_per_expert=each)
    exact = replace(layer, rows=(codes.float() * scales[..., None]).view(count, 512))
    check(exact, out)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_row_leaves_other_rows_unchanged(broken: float) -> None:
    torch.manual_seed(9)
    layer = Layer.of((4, 256, 128), [3, 2, 0, 5], codes=True)
    experts, outs = hopper(layer), []
    for value in (0.0, broken):
        layer.rows[4, 200] = value
        scratch, out = layer.room(experts)
        experts.run(layer.given(), scratch, out, rows_per_expert=3)
        outs.append(out[: len(layer.rows)].clone())
    others = [row for row in range(len(layer.rows)) if row != 4]
    assert torch.equal(outs[0][others], outs[1][others])
    assert not outs[1][4].isfinite().any()


def test_rows_of_every_magnitude_keep_bfloat16_precision() -> None:
    """Also zeros, and those far below the group's largest. What is smallest of bfloat16 must not be NaN."""
    torch.manual_seed(10)
    layer = Layer.of((2, 256, 128), [16, 16], codes=True)
    powers = torch.randint(-12, 12, layer.rows.shape, device="cuda").float()
    layer.rows.mul_(torch.exp2(powers).to(BF16))
    layer.rows[0] = 0
    layer.rows[1] = 2.0**-130
    layer.rows[2, :64] = 0
    layer.rows[3] *= 2.0**-40
    experts = hopper(layer)
    scratch, out = layer.room(experts)
    experts.run(layer.given(), scratch, out, rows_per_expert=16)
    expected = layer.expected()
    for row in range(len(expected)):
        found, size = out[row].float(), float(expected[row].norm())
        assert float((found - expected[row]).norm()) <= 6e-3 * size + 1e-30
