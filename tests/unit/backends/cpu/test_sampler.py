"""Which token the sampler takes, what it says of it, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from ep_server.backends.cpu import sampling_ops as ops
from ep_server.backends.cpu.sampler import Sampler, UniformStream
from ep_server.errors import InternalError, InvalidArgument
from ep_server.records import NO_TOKEN, SampledToken, Sampling
from tests.support.sampling import GREEDY, SIZES, ids, request, rows, sampler_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_largest(vocab, dtype):
    logits = rows(5, vocab).to(dtype)
    logits[1] = 0.25  # all equal
    logits[2, vocab // 2 :] = 50.0
    logits[3] = -math.inf
    logits[3, vocab - 1] = -1e30
    sampler = sampler_of(vocab, *(request(n, GREEDY) for n in range(5)))
    expected = [row.tolist().index(max(row.tolist())) for row in logits]
    tokens = sampler.sample(range(5), logits)
    assert ids(tokens) == expected
    assert [token.number for token in tokens] == [0, 1, 2, 3, 4]
    assert all(token.logprob is None and token.top == () for token in tokens)


def test_no_rows_give_no_tokens():
    assert Sampler(7).sample([], torch.empty(0, 7)) == []


@pytest.mark.parametrize("vocab", SIZES)
def test_draw_inverts_the_cumulative_distribution(vocab):
    weights = rows(64, vocab, seed=1).exp()
    weights[torch.rand(weights.shape, generator=torch.Generator().manual_seed(2)) < 0.5] = 0
    weights[:, vocab // 3] = 1.0
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    uniforms[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=torch.float64)
    drawn = ops.draw(weights, uniforms)
    for row, u, token in zip(weights.double(), uniforms.tolist(), drawn.tolist(), strict=True):
        assert row[token] > 0
        share = row.cumsum(0) / row.sum()
        below = float(share[token - 1]) if token else 0.0
        assert below - 1e-6 <= u <= float(share[token]) + 1e-6


@pytest.mark.parametrize("zeros", [1, 63, 64, 130])
def test_an_id_without_weight_is_never_drawn(zeros):
    """At the ends of [0, 1) and where the target meets a step of the cumulative distribution exactly."""
    weights = torch.zeros(4, 2 * zeros + 3)
    weights[:, zeros] = weights[:, zeros + 2] = 1.0
    uniforms = torch.tensor([0.0, 0.5, 0.5 - 2**-54, 1 - 2**-53], dtype=torch.float64)
    assert ops.draw(weights, uniforms).tolist() == [zeros, zeros + 2, zeros, zeros + 2]


def test_frequencies_follow_the_softmax():
    """Chi-square over 40,000 draws with a fixed seed; 99.9 % quantile for 19 degrees of freedom is 43.8."""
    vocab, count = 20, 40_000
    logits = rows(1, vocab, scale=1.0)
    expected = (logits[0].double() / 0.7).softmax(0) * count
    stream = UniformStream(11)
    uniforms = torch.tensor([stream.at(i) for i in range(count)], dtype=torch.float64)
    weights = ops.relative_weights(logits, logits.amax(-1), torch.tensor([0.7])).expand(count, -1)
    seen = ops.draw(weights, uniforms).bincount(minlength=vocab).double()
    assert float(((seen - expected) ** 2 / expected).sum()) < 43.8


def test_sample_draws_the_same_distribution_through_requests():
    """500 requests of different seeds, 4 tokens each: every token within 5 sigma of its share."""
    vocab, requests = 70, 500
    logits = rows(1, vocab, seed=4, scale=1.5)
    sampler = sampler_of(vocab, *(request(n, Sampling(seed=n * 7919)) for n in range(requests)))
    drawn = [t for _ in range(4) for t in ids(sampler.sample(range(requests), logits.expand(requests, -1)))]
    share = logits[0].double().softmax(0)
    sigma = (share * (1 - share) / len(drawn)).sqrt()
    seen = torch.tensor(drawn).bincount(minlength=vocab).double() / len(drawn)
    assert bool(((seen - share).abs() < 5 * sigma + 1e-9).all())


def test_logprobs_are_read_before_temperature_and_filters():
    vocab = 77
    logits = rows(4, vocab, seed=9)
    settings = [
        Sampling(temperature=0.0, logprobs=0),
        Sampling(temperature=2.0, top_k=1, seed=5, logprobs=3),
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, logprobs=500),
    ]
    sampler = sampler_of(vocab, *(request(n, s) for n, s in enumerate(settings)))
    tokens = sampler.sample(range(4), logits)
    expected = logits.log_softmax(-1)
    for row in (0, 1, 3):
        assert tokens[row].logprob == pytest.approx(float(expected[row, tokens[row].token_id]), abs=1e-6)
    assert tokens[2].logprob is None
    assert [len(token.top) for token in tokens] == [0, 3, 0, vocab]
    best = expected[1].topk(3)
    assert [token for token, _ in tokens[1].top] == best.indices.tolist()
    assert [value for _, value in tokens[1].top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert sum(math.exp(value) for _, value in tokens[3].top) == pytest.approx(1.0, abs=1e-5)


def test_a_shape_or_number_that_was_not_added_is_named():
    sampler = sampler_of(10, request(1, GREEDY))
    with pytest.raises(InternalError, match=r"\(1, 11\) for 1 rows of 10"):
        sampler.sample([1], torch.zeros(1, 11))
    with pytest.raises(InternalError, match="number 2 is not in the sampler"):
        sampler.sample([2], torch.zeros(1, 10))
    with pytest.raises(InternalError, match="number 1 is already in the sampler"):
        sampler.add(request(1, GREEDY))
    sampler.remove(1)
    sampler.remove(1)
    assert len(sampler) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 63, 64, 99])
def test_a_broken_row_draws_no_token_and_its_neighbours_do(bad, position):
    sampling = Sampling(seed=1, repetition_penalty=1.5, logprobs=2)
    sampler = sampler_of(100, *(request(n, sampling) for n in (4, 5, 6)))
    alone = sampler_of(100, *(request(n, sampling) for n in (4, 6)))
    for step in range(3):
        logits = rows(3, 100, seed=step)
        logits[1, position] = bad
        first, broken, last = sampler.sample([4, 5, 6], logits)
        assert broken == SampledToken(5, NO_TOKEN)
        assert [first, last] == alone.sample([4, 6], logits[[0, 2]])
    assert ids(sampler.sample([5], rows(1, 100))) != [NO_TOKEN]


def test_a_row_without_any_allowed_token_draws_none():
    sampling = Sampling(temperature=0.0, logit_bias=tuple((token, -math.inf) for token in range(5)))
    drawn = sampler_of(5, request(0, sampling)).sample([0], torch.zeros(1, 5))
    assert drawn == [SampledToken(0, NO_TOKEN)]


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30, 1e308])
def test_a_temperature_beyond_float32_never_draws_a_banned_token(temperature):
    sampling = Sampling(temperature=temperature, seed=1)
    stops = frozenset(range(1, 100))
    sampler = sampler_of(100, request(1, sampling, min_new_tokens=9, eos_token_ids=stops))
    drawn = [sampler.sample([1], rows(1, 100, seed=step))[0].token_id for step in range(9)]
    assert drawn == [0] * 9


def test_bad_requests_are_refused_when_added():
    with pytest.raises(InvalidArgument, match="seed = None"):
        Sampler(10).add(request(0, Sampling()))
    with pytest.raises(InvalidArgument, match="logit_bias = 10: must be a token id, 0 to 9"):
        Sampler(10).add(request(0, Sampling(temperature=0.0, logit_bias=((10, 1.0),))))
    with pytest.raises(InvalidArgument, match="stop_token_ids = -1"):
        Sampler(10).add(request(0, GREEDY, min_new_tokens=1, stop_token_ids=frozenset([-1])))
