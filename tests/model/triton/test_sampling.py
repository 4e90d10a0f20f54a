"""Greedy against argmax; kept sets against the CPU sampler's filters; draws against the noise behind them."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from ep_server.errors import InternalError
from ep_server.model import sampling_ops as ops
from ep_server.model.triton.sampling import SamplingRows, SamplingSpace, sample
from ep_server.model.triton.sampling_weights import noise, quarter_of, scaled
from tests.model.triton.harness import DEVICE, NAN, poisoned, random

INF = float("inf")


def rows_of(
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: list[int] | None = None,
    position: int = 0,
) -> SamplingRows:
    def floats(value: float) -> torch.Tensor:
        return torch.full((count,), value, device=DEVICE)

    return SamplingRows(
        floats(temperature),
        torch.full((count,), top_k, dtype=torch.int32, device=DEVICE),
        floats(top_p),
        floats(min_p),
        torch.tensor(seeds or list(range(count)), dtype=torch.int64, device=DEVICE),
        torch.full((count,), position, device=DEVICE),
    )


def draw(
    logits: torch.Tensor, rows: SamplingRows, splits: int = 2, **options: bool
) -> tuple[list[int], SamplingSpace]:
    """The workspace starts as NaN."""
    space = SamplingSpace.of(len(logits), splits, DEVICE)
    for part in (space.values, space.highest, space.cutoff):
        part.fill_(NAN)
    space.ids.fill_(-7)
    tokens = torch.full((len(logits),), -9, device=DEVICE)
    sample(logits, rows, space, tokens, **options)
    return tokens.tolist(), space


@triton.jit
def _inspect_kernel(
    logits, weights, keys, highest, temperature, seed, position, VOCAB: tl.constexpr, QUARTER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The weights and keys of a row of logits, one tile for each quarter of the vocabulary."""
    quad = tl.arange(0, BLOCK)
    variates = noise(tl.load(seed), tl.load(position), quad, QUARTER)
    for part in tl.static_range(4):
        token = quad + part * QUARTER
        real = (quad < QUARTER) & (token < VOCAB)
        z = scaled(tl.load(logits + token, mask=real, other=0.0), tl.load(highest), tl.load(temperature))
        tl.store(weights + token, tl.exp(z), mask=real)
        tl.store(keys + token, z - tl.log(variates[part]), mask=real)


def weights_and_keys(logits: torch.Tensor, rows: SamplingRows, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    vocab = logits.shape[1]
    weights, keys = (torch.empty(vocab, device=DEVICE) for _ in range(2))
    top = logits[row].float().max().reshape(1)
    one = slice(row, row + 1)
    _inspect_kernel[(1,)](
        logits[row].contiguous(), weights, keys, top,
        rows.temperature[one], rows.seed[one], rows.position[one],
        VOCAB=vocab, QUARTER=quarter_of(vocab), BLOCK=triton.next_power_of_2(quarter_of(vocab)),
    )  # fmt: skip
    return weights, keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "splits"), [(1, 1), (3, 2), (257, 1), (5000, 3), (64, 8)])
def test_greedy_is_argmax(vocab: int, splits: int, dtype: torch.dtype) -> None:
    """Rows lie in wider ones of NaN; the lowest id of equal ones; more splits than there is to cut."""
    logits = poisoned(random(4, vocab).round(decimals=1).to(dtype), 3)
    logits[3] = 2.5
    expected = ops.argmax_rows(logits.float().cpu())[1].tolist()
    assert draw(logits, rows_of(4, temperature=0.0), splits)[0] == expected
    assert draw(logits, rows_of(4, temperature=0.0), splits, random=False)[0] == expected


def test_broken_rows_get_no_token() -> None:
    for temperature in (0.0, 1.0):
        logits = random(5, 70)
        logits[0, 69], logits[1, 3], logits[2], logits[3, :60] = NAN, INF, -INF, -INF
        tokens, _ = draw(logits, rows_of(5, temperature, top_k=3, top_p=0.9))
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
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_what_the_cpu_sampler_keeps(filters: dict[str, float]) -> None:
    """With equal logits about, which stay or go together, and a banned token."""
    logits = random(2, 150, scale=2.0)
    logits[0] = logits[0].round()
    logits[1, 7] = -INF
    rows = rows_of(2, **filters)
    tokens, space = draw(logits, rows)
    for row in range(2):
        weights, keys = weights_and_keys(logits, rows, row)
        expected = weights.clone()[None]
        one = slice(row, row + 1)
        ops.filter_weights(expected, rows.top_k[one].long(), rows.top_p[one], rows.min_p[one])
        kept = weights >= space.cutoff[row]
        assert torch.equal(kept & (weights > 0), expected[0] > 0)
        assert tokens[row] == int(torch.where(kept, keys, -INF).argmax())


def test_the_likeliest_token_stays_whatever_min_p_says() -> None:
    logits = random(2, 40)
    assert draw(logits, rows_of(2, min_p=1.5))[0] == logits.argmax(-1).tolist()


def test_a_nucleus_larger_than_any_shortcut() -> None:
    """The CPU sampler finds those by bisection; equal logits at the edge go in together."""
    logits = torch.zeros(1, 700, device=DEVICE)
    logits[0, 300:] = -1.0
    weights, _ = weights_and_keys(logits, rows_of(1), 0)
    share = float(weights[:300].sum() / weights.sum())
    for top_p, size in ((share - 0.01, 300), (share + 0.01, 700)):
        _, space = draw(logits, rows_of(1, top_p=top_p))
        assert int((weights >= space.cutoff[0]).sum()) == size


def test_tokens_do_not_depend_on_batch_or_splits() -> None:
    logits = random(3, 300)
    seeds = [3, -1, 1 << 62]
    together = draw(logits, rows_of(3, seeds=seeds, position=6, top_p=0.9), splits=2)[0]
    for row in (2, 0):
        alone = draw(
            logits[row : row + 1], rows_of(1, seeds=seeds[row : row + 1], position=6, top_p=0.9), splits=1
        )
        assert alone[0] == [together[row]]


def test_greedy_and_random_rows_in_one_batch() -> None:
    logits = random(4, 90)
    mixed = rows_of(4, seeds=[5, 6, 7, 8])
    mixed.temperature[1::2] = 0.0
    tokens = draw(logits, mixed)[0]
    assert tokens[1::2] == logits[1::2].argmax(-1).tolist()
    assert tokens[::2] == draw(logits, rows_of(4, seeds=[5, 6, 7, 8]))[0][::2]


def test_position_and_seed_change_the_noise() -> None:
    logits = torch.zeros(1, 900, device=DEVICE)
    drawn = {
        draw(logits, rows_of(1, seeds=[seed], position=position), 1)[0][0]
        for seed, position in ((0, 0), (0, 1), (1, 0), (1 << 32, 0), (0, 1 << 32))
    }
    assert len(drawn) == 5


def test_the_noise_is_exponential() -> None:
    """Kolmogorov-Smirnov over 4 x 4096 variates, also of the small ones alone; no two places share one."""
    logits = torch.zeros(1, 16384, device=DEVICE)
    _, keys = weights_and_keys(logits, rows_of(1, seeds=[11], position=2), 0)
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
    _, keys = weights_and_keys(p.log().repeat(3200)[None], rows_of(1, seeds=[5]), 0)
    counts = torch.bincount(keys.view(3200, 5).argmax(1), minlength=5)
    assert float(((counts - 3200 * p).square() / (3200 * p)).sum()) < 18.5


def test_no_rows() -> None:
    assert draw(random(0, 10), rows_of(0))[0] == []


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(InternalError, match="temperature"):
        draw(random(3, 10), rows_of(2))
    with pytest.raises(InternalError, match="splits = 129"):
        draw(random(2, 10), rows_of(2), 129)
    with pytest.raises(InternalError, match="logits"):
        draw(random(2, 10).long(), rows_of(2))
