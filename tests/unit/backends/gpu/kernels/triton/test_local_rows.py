"""Against sorting and summing in float64; what no choice has stays NaN, and is not read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.local_rows import (
    ExpertOutputs,
    Places,
    add_outputs_norm,
    place_rows,
)
from ep_server.backends.gpu.kernels.triton.norm import add_rms_norm, rms_norm
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE, NAN, assert_near, random

UNWRITTEN, EPS = -7, 1e-3


def chosen(tokens: int, experts: int, k: int, padded: int) -> torch.Tensor:
    keys = random(tokens, experts, seed=tokens).cpu()
    ids = torch.topk(keys, k, dim=-1).indices
    ids[tokens - padded :] = -1
    return ids.to(DEVICE)


def filled(ids: torch.Tensor, experts: int) -> Places:
    places = Places.empty(ids, experts)
    for tensor in (places.counts, places.offsets, places.tokens, places.rows):
        tensor.fill_(UNWRITTEN)
    return places


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "padded"),
    [(5, 4, 2, 0), (64, 128, 8, 3), (1, 1, 1, 0), (7, 6, 3, 7), (300, 10, 8, 1), (0, 4, 2, 0)],
)
def test_choices_are_sorted_by_expert(tokens: int, experts: int, k: int, padded: int) -> None:
    """300 x 8 choices are more than one chunk."""
    ids = chosen(tokens, experts, k, padded)
    places, totals = filled(ids, experts), torch.full((experts,), 5, dtype=torch.int32, device=DEVICE)
    place_rows(ids, places, totals)
    flat = ids.flatten().tolist()
    by_expert = [[n for n, one in enumerate(flat) if one == e] for e in range(experts)]
    order = [n for those in by_expert for n in those]
    assert places.counts.tolist() == [len(those) for those in by_expert]
    assert totals.tolist() == [5 + len(those) for those in by_expert]
    assert places.offsets.tolist() == [sum(map(len, by_expert[:e])) for e in range(experts + 1)]
    assert places.tokens.tolist() == [n // k for n in order] + [UNWRITTEN] * (len(flat) - len(order))
    rows = {n: row for row, n in enumerate(order)}
    assert places.rows.flatten().tolist() == [rows.get(n, UNWRITTEN) for n in range(len(flat))]


def answered(dtype: torch.dtype, width: int) -> ExpertOutputs:
    """7 tokens of 4 choices among 12 experts, then two of padding. Outputs that no choice has are NaN."""
    ids = chosen(9, 12, 4, 2)
    places = filled(ids, 12)
    place_rows(ids, places, torch.zeros(12, dtype=torch.int32, device=DEVICE))
    gates = random(9, 4, seed=3)
    gates[7:] = NAN
    rows = torch.full((36, width), NAN, dtype=dtype, device=DEVICE)
    rows[:28] = random(28, width, dtype=dtype, seed=4)
    return ExpertOutputs(rows, ids, gates, places.rows)


@pytest.mark.parametrize("shared", [False, True], ids=("alone", "shared"))
@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("width", [24, 2048, 1536])
def test_answers_are_summed_and_normed(
    dtype: torch.dtype, wire: torch.dtype, width: int, shared: bool
) -> None:
    """The sum is rounded as one that travels is, and what is normed is what later layers read."""
    answers = answered(wire, width)
    residual, weight = random(9, width, dtype=dtype, seed=5), random(width, dtype=dtype, seed=6)
    picked = answers.rows[answers.places[:7].long()].double()
    total = torch.zeros(9, width, dtype=torch.float64, device=DEVICE)
    total[:7] = (picked * answers.gates[:7, :, None].double()).sum(1)
    branch = total.to(wire).to(dtype)
    if shared:
        answers = replace(answers, shared=random(9, width, dtype=dtype, seed=7))
        branch = branch + answers.shared
    wanted, out = residual.clone(), torch.full_like(residual, NAN)
    normed = torch.empty_like(out)
    add_rms_norm(branch, wanted, weight, EPS, normed)
    add_outputs_norm(answers, residual, weight, EPS, out)
    if wire is torch.float32:
        assert_near(residual, wanted.double())
    else:  # in float64 one sum in many is rounded the other way
        assert (residual == wanted).float().mean() > 0.98
        assert bool(((residual - wanted).abs() <= 2.0**-7 * (1 + branch.abs() + wanted.abs())).all())
    again = torch.empty_like(out)
    rms_norm(residual, weight, EPS, again)
    if dtype is torch.float32:  # the two kernels may add up squares in another order
        assert_near(out, again.double())
    else:
        assert torch.equal(out, again)


def test_another_dtype_is_refused() -> None:
    ids = chosen(4, 4, 2, 0)
    with pytest.raises(InternalError, match=r"ids: torch.int32"):
        place_rows(ids.int(), Places.empty(ids, 4), torch.zeros(4, dtype=torch.int32, device=DEVICE))
    x, places = random(4, 8), Places.empty(ids, 4).rows
    with pytest.raises(InternalError, match="gates"):
        add_outputs_norm(ExpertOutputs(random(8, 8), ids, random(4, 3), places), x, random(8), EPS, x)
    with pytest.raises(InternalError, match=r"shared: torch\.bfloat16"):
        shared = random(4, 8, dtype=torch.bfloat16)
        add_outputs_norm(ExpertOutputs(random(8, 8), ids, random(4, 2), places, shared), x, random(8), EPS, x)
