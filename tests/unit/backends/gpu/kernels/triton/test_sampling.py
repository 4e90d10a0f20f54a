"""Greedy against argmax; draws against the noise behind them and what the CPU sampler's filters leave."""

from __future__ import annotations

import math

import pytest
import torch

from ep_server.backends.cpu import sampling_ops as ops
from ep_server.backends.gpu.kernels.triton.sampling_table import SamplingTable, Wants
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE, NAN, poisoned, random
from tests.support.triton.sampling_rows import draw, searching, table_of, weights_and_keys

INF = float("inf")
LARGE = 5000  # more tokens than there is room for as candidates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "splits"), [(1, 1), (3, 2), (257, 1), (5000, 3), (64, 8)])
def test_greedy_is_argmax(vocab: int, splits: int, dtype: torch.dtype) -> None:
    """Rows lie in wider ones of NaN; the lowest id of equal ones; more splits than there is to cut."""
    logits = poisoned(random(4, vocab).round(decimals=1).to(dtype), 3)
    logits[3] = 2.5
    expected = ops.argmax_rows(logits.float().cpu())[1].tolist()
    assert draw(logits, table_of(4, vocab, 0.0), splits)[0] == expected
    assert draw(logits, table_of(4, vocab, 0.0), splits, wants=Wants.NOTHING)[0] == expected


@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9}, {"reported": 2}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_get_no_token(temperature: float, filters: dict[str, float]) -> None:
    logits = random(5, 70)
    logits[0, 69], logits[1, 3], logits[2], logits[3, :60] = NAN, INF, -INF, -INF
    wants = Wants(sum(Wants))
    tokens, _ = draw(logits, table_of(5, 70, temperature, **filters), wants=wants)
    assert tokens[:3] == [-1, -1, -1] and 60 <= tokens[3] < 70 and 0 <= tokens[4] < 70


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.97, "temperature": 3.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 3, "temperature": 1e-38},
    {"top_p": 0.6, "temperature": 1e38},
    {"top_k": 7, "temperature": 1e38},
]


def assert_drawn_among_the_kept(
    logits: torch.Tensor, table: SamplingTable, tokens: list[int], cutoff: torch.Tensor | None
) -> None:
    """The token of the highest key among what the CPU sampler's filters leave; and exactly these are left."""
    for row, token in enumerate(tokens):
        weights, keys = weights_and_keys(logits, table, row)
        left, slot = weights.clone()[None], len(tokens) - 1 - row
        one = slice(slot, slot + 1)
        ops.filter_weights(left, table.longs[one, 0], table.floats[one, 1], table.floats[one, 2])
        kept = left[0] > 0
        assert token == int(torch.where(kept, keys, -INF).argmax())
        if cutoff is not None and not bool(cutoff[row].isnan()):  # of those that need one
            assert torch.equal((weights >= cutoff[row]) & (weights > 0), kept)


@pytest.mark.parametrize("vocab", [150, LARGE])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_what_the_cpu_sampler_keeps(filters: dict[str, float], vocab: int) -> None:
    """With equal logits about, which stay or go together, and a banned token."""
    logits = random(3, vocab, scale=2.0)
    logits[0] = logits[0].round()
    logits[1, 7] = -INF
    table = table_of(3, vocab, **filters)
    tokens, space = draw(logits, table)
    filtered = bool((table.longs[:3, 5] & int(Wants.FILTER)).all())
    assert_drawn_among_the_kept(logits, table, tokens, space.cutoff if filtered else None)


@pytest.mark.parametrize(
    "filters", [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.9}, {"top_k": 3000}], ids=str
)
@pytest.mark.parametrize("shape", ["peaked", "flat", "equal", "few", "one-high", "crowded", "bfloat16"])
def test_candidates_or_the_whole_row(shape: str, filters: dict[str, float]) -> None:
    """Rows whose filters end among the candidates, and rows where these are too few or too many."""
    logits = random(1, LARGE)
    if shape == "peaked":
        logits *= 6
    elif shape == "equal":
        logits = logits.round()
    elif shape == "few":  # as with allowed_token_ids
        logits[0, torch.arange(LARGE, device=DEVICE) % 900 != 3] = -INF
    elif shape == "one-high":
        logits[0, 77] = 1e30
    elif shape == "crowded":  # the likely ones side by side
        logits[0, 1024:3300] += 20
    elif shape == "bfloat16":
        logits = logits.bfloat16()
    table = table_of(1, LARGE, **filters)
    for each in (table,) if "top_k" in filters else (table, searching(table)):
        tokens, space = draw(logits, each, 3)
        assert_drawn_among_the_kept(logits.float(), table, tokens, space.cutoff)


def test_a_row_of_candidates_reads_no_more_than_it_must() -> None:
    """Top-k of a row with one logit above another: its candidates are few more than k."""
    logits = random(1, LARGE)
    _, space = draw(logits, table_of(1, LARGE, top_k=50))
    assert 50 < int(space.counts[0]) < 120
    listed = space.listed_ids[0, : int(space.counts[0])].long()
    assert torch.equal(logits[0, listed].sort().values, logits[0].sort().values[-len(listed) :])
    assert torch.equal(logits[0, listed], space.listed[0, : len(listed)])


def test_the_likeliest_token_stays_whatever_min_p_says() -> None:
    logits = random(2, 40)
    assert draw(logits, table_of(2, 40, min_p=1.5))[0] == logits.argmax(-1).tolist()
    assert draw(logits, table_of(2, 40, min_p=1.5, top_k=9))[0] == logits.argmax(-1).tolist()


def test_a_nucleus_larger_than_any_shortcut() -> None:
    """The CPU sampler finds those by bisection; equal logits at the edge go in together."""
    logits = torch.zeros(1, LARGE, device=DEVICE)
    logits[0, 3000:] = -1.0
    weights, _ = weights_and_keys(logits, table_of(1, LARGE), 0)
    share = float(weights[:3000].sum() / weights.sum())
    for top_p, size in ((share - 0.01, 3000), (share + 0.01, LARGE)):
        _, space = draw(logits, searching(table_of(1, LARGE, top_p=top_p)))
        assert int((weights >= space.cutoff[0]).sum()) == size


@pytest.mark.parametrize(
    ("top_p", "rows"),
    [(0.5, 6), (0.02, 6), *(pytest.param(p, 24, marks=pytest.mark.slow) for p in (0.95, 0.5, 0.02))],
)
def test_the_race_and_the_search_draw_the_same(top_p: float, rows: int) -> None:
    """The highest key lies outside of the nucleus, the second may too, or all that are tried."""
    logits = random(1, LARGE, scale=0.3).repeat(rows, 1)
    table = table_of(rows, LARGE, top_p=top_p, min_p=0.03)
    raced, space = draw(logits, table, 2)
    assert bool((space.open_rows == 1).all()) == (top_p > 0.1)
    searched, _ = draw(logits, searching(table), 2)
    assert raced == searched
    won_at_once = int(space.cutoff.isnan().sum())
    assert won_at_once > rows // 2 if top_p > 0.4 else won_at_once < rows


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 20}], ids=str)
def test_tokens_do_not_depend_on_batch_or_splits(filters: dict[str, float]) -> None:
    logits = random(3, 3000)
    seeds = [3, -1, 1 << 62]
    together = draw(logits, table_of(3, 3000, seeds=seeds, position=6, **filters), splits=2)[0]
    for row in (2, 0):
        table = table_of(1, 3000, seeds=seeds[row : row + 1], position=6, **filters)
        assert draw(logits[row : row + 1], table, splits=5)[0] == [together[row]]


def test_greedy_and_random_rows_in_one_batch() -> None:
    logits, seeds = random(4, 90), [5, 6, 7, 8]
    tokens = draw(logits, table_of(4, 90, [1.0, 0.0, 1.0, 0.0], seeds=seeds))[0]
    assert tokens[1::2] == logits[1::2].argmax(-1).tolist()
    assert tokens[::2] == draw(logits, table_of(4, 90, seeds=seeds))[0][::2]


def test_position_and_seed_change_the_noise() -> None:
    logits = torch.zeros(1, 900, device=DEVICE)
    drawn = {
        draw(logits, table_of(1, 900, seeds=[seed], position=position), 1)[0][0]
        for seed, position in ((0, 0), (0, 1), (1, 0), (1 << 32, 0), (0, 1 << 32))
    }
    assert len(drawn) == 5


def test_the_noise_is_exponential() -> None:
    """Kolmogorov-Smirnov over 4 x 4096 variates, also of the small ones alone; no two places share one."""
    logits = torch.zeros(1, 16384, device=DEVICE)
    _, keys = weights_and_keys(logits, table_of(1, 16384, seeds=[11], position=2), 0)
    variates = (-keys.double()).exp().sort().values
    for sample_ in (variates, variates[variates < 0.01] / 0.01 * math.log(2)):
        cdf = 1 - (-sample_).exp()
        cdf = cdf / cdf[-1] if len(sample_) < 1000 else cdf
        grid = torch.arange(1, len(sample_) + 1, device=DEVICE) / len(sample_)
        assert float((cdf - grid).abs().max()) < 1.95 / math.sqrt(len(sample_))  # passes 999 of 1000 seeds
    assert len(keys.unique()) > 16000


def test_highest_keys_follow_the_distribution() -> None:
    """Chi-squared over 3200 draws of 5 tokens, from one row's keys; passes 999 of 1000 seeds."""
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], device=DEVICE)
    _, keys = weights_and_keys(p.log().repeat(3200)[None], table_of(1, 16000, seeds=[5]), 0)
    counts = torch.bincount(keys.view(3200, 5).argmax(1), minlength=5)
    assert float(((counts - 3200 * p).square() / (3200 * p)).sum()) < 18.5


def test_no_rows() -> None:
    assert draw(random(0, 10), table_of(0, 10))[0] == []


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(InternalError, match="counts"):
        draw(random(3, 10), table_of(3, 11))
    with pytest.raises(InternalError, match="splits = 129"):
        draw(random(2, 10), table_of(2, 10), 129)
    with pytest.raises(InternalError, match="logits"):
        draw(random(2, 10).long(), table_of(2, 10))
