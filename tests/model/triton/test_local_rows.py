"""Against sorting and summing in float64; what no choice has stays NaN, and is not read."""

from __future__ import annotations

import pytest
import torch

from ep_server.errors import InternalError
from ep_server.model.triton.local_rows import Places, place_rows, sum_rows
from tests.model.triton.harness import DEVICE, NAN, assert_near, random

UNWRITTEN = -7


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 2048, 1536])
def test_answers_are_summed_in_float32(dtype: torch.dtype, width: int) -> None:
    ids = chosen(9, 12, 4, 2)
    places = filled(ids, 12)
    place_rows(ids, places, torch.zeros(12, dtype=torch.int32, device=DEVICE))
    weights = random(9, 4, seed=3)
    weights[7:] = NAN
    answers = torch.full((36, width), NAN, dtype=dtype, device=DEVICE)
    answers[:28] = random(28, width, dtype=dtype, seed=4)
    out = torch.full((9, width), NAN, dtype=dtype, device=DEVICE)
    sum_rows(answers, ids, weights, places.rows, out)
    picked = answers[places.rows[:7].long()].double()
    assert_near(out[:7], (picked * weights[:7, :, None].double()).sum(1))
    assert not out[7:].any()


def test_another_dtype_is_refused() -> None:
    ids = chosen(4, 4, 2, 0)
    with pytest.raises(InternalError, match=r"ids: torch.int32"):
        place_rows(ids.int(), Places.empty(ids, 4), torch.zeros(4, dtype=torch.int32, device=DEVICE))
    with pytest.raises(InternalError, match="weights"):
        sum_rows(random(8, 8), ids, random(4, 3), Places.empty(ids, 4).rows, random(4, 8))
