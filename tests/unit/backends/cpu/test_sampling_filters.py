"""Filters, penalties and allowed tokens against transformers' logits processors, and on their edges."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from ep_server.backends.cpu import sampling_ops as ops
from ep_server.backends.cpu.sampler import Sampler
from ep_server.errors import InvalidArgument
from ep_server.records import NO_TOKEN, Sampling
from tests.support.sampling import (
    FILTERS,
    GREEDY,
    PENALTIES,
    SIZES,
    ids,
    request,
    rows,
    sampler_of,
)

if TYPE_CHECKING:
    import transformers as hf

pytestmark = pytest.mark.usefixtures("one_thread")


def hf_filters(sampling: Sampling) -> hf.LogitsProcessorList:
    import transformers as hf

    chain = [hf.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        chain.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(hf.MinPLogitsWarper(sampling.min_p))
    return hf.LogitsProcessorList(chain)


def our_probabilities(logits: torch.Tensor, settings: list[Sampling]) -> torch.Tensor:
    weights = ops.relative_weights(logits, logits.amax(-1), torch.tensor([s.temperature for s in settings]))
    ops.filter_weights(
        weights,
        torch.tensor([s.top_k for s in settings]),
        torch.tensor([s.top_p for s in settings]),
        torch.tensor([s.min_p for s in settings]),
    )
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("vocab", SIZES)
def test_filters_equal_transformers_in_a_mixed_batch(vocab):
    logits = rows(len(FILTERS), vocab, seed=5)
    ours = our_probabilities(logits, FILTERS)
    for row, sampling in enumerate(FILTERS):
        if vocab == 1 and sampling.top_p < 1e-3:
            continue  # transformers' own warper removes the only token there
        expected = hf_filters(sampling)(None, logits[row : row + 1].clone()).softmax(-1)[0]
        assert torch.equal(ours[row] > 0, expected > 0), sampling
        torch.testing.assert_close(ours[row], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
def test_a_wide_nucleus_is_found_by_bisection_as_by_sorting(top_p):
    weights = ops.relative_weights(w := rows(6, 2000, scale=0.7), w.amax(-1), torch.ones(6))
    ordered = weights.double().sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    expected = ordered.gather(1, (before < top_p * ordered.sum(-1, keepdim=True)).sum(-1, keepdim=True) - 1)
    found = ops._bisect_cutoff(weights, weights.sum(-1) * top_p)
    assert torch.equal(found.double(), expected[:, 0])


def test_equal_weights_stay_or_go_together():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0, -5.0]])
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.75)):
        kept = our_probabilities(logits, [sampling])[0] > 0
        assert kept.tolist() == [True, True, True, True, False, False]


def test_a_nucleus_that_is_reached_exactly_takes_nothing_more():
    for filler in (0, 200):  # a short row, and one with more tokens than the candidates looked at first
        weights = torch.cat([torch.tensor([[0.25, 1.0, 0.5, 0.25]]), torch.zeros(1, filler)], dim=1)
        ops.filter_weights(weights, torch.tensor([0]), torch.tensor([0.5]), torch.tensor([0.0]))
        assert weights[0, :4].tolist() == [0, 1, 0, 0]
    found = ops._bisect_cutoff(torch.tensor([[0.25, 1.0, 0.5, 0.25]]), torch.tensor([1.0]))
    assert found.tolist() == [1.0]


def test_only_what_the_filters_keep_is_drawn():
    vocab = 50
    sampler = sampler_of(vocab, request(0, Sampling(seed=3, temperature=5.0, top_k=4)))
    logits = rows(1, vocab, seed=6)
    drawn = {ids(sampler.sample([0], logits))[0] for _ in range(300)}
    assert drawn == set(logits[0].topk(4).indices.tolist())


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-60])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = rows(3, 130, seed=7) * 1e4
    settings = Sampling(seed=1, temperature=temperature, top_p=0.9)
    sampler = sampler_of(130, *(request(n, settings) for n in range(3)))
    assert ids(sampler.sample(range(3), logits)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("sampling", PENALTIES)
def test_greedy_tokens_with_penalties_equal_transformers(sampling):
    import transformers as hf

    vocab, prompt, eos = 90, (3, 17, 3, 41), 17
    chain = hf.LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    if sampling.logit_bias:
        finite = {(token,): max(bias, -1e9) for token, bias in sampling.logit_bias}
        chain.append(hf.SequenceBiasLogitsProcessor(finite))
    chain.append(hf.MinNewTokensLengthLogitsProcessor(len(prompt), 6, eos))
    sampler = sampler_of(
        vocab, request(0, sampling, prompt, min_new_tokens=6, eos_token_ids=frozenset([eos]))
    )
    history = list(prompt)
    for step in range(40):
        logits = rows(1, vocab, seed=100 + step // 3, scale=1.0)  # repeats, so that penalties decide
        logits[0, eos] = 6.0
        expected = int(chain(torch.tensor([history]), logits.clone()).argmax(-1))
        assert ids(sampler.sample([0], logits)) == [expected]
        assert (expected == eos) <= (step >= 6)
        history.append(expected)


def test_presence_and_frequency_count_the_output_only():
    vocab, sampling = 8, Sampling(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, logprobs=8)
    sampler = sampler_of(vocab, request(0, sampling, prompt=(1, 1, 1)))
    logits = torch.tensor([[0.0, 3.0, 2.6, 0, 0, 0, 0, -4.0]])
    counts = torch.zeros(vocab)
    for _ in range(12):
        expected = logits[0] - 0.25 * counts - 0.5 * (counts > 0)
        token = sampler.sample([0], logits)[0]
        assert token.token_id == int(expected.argmax())
        assert token.logprob == pytest.approx(float(expected.log_softmax(0)[token.token_id]), abs=1e-6)
        counts[token.token_id] += 1
    assert counts[1] > 1 and counts[2] > 1


def test_presence_spares_the_prompt_where_repetition_does_not():
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, presence_penalty=0.75, logprobs=4)
    sampler = sampler_of(4, request(0, sampling, prompt=(1, 3)))
    logits = torch.tensor([[3.0, 8.0, 0.0, -2.0]])
    for expected in ([3.0, 4.0, 0.0, -4.0], [3.0, 3.25, 0.0, -4.0]):  # token 1 is drawn in between
        (token,) = sampler.sample([0], logits)
        wanted = torch.tensor(expected).log_softmax(0)
        assert dict(token.top) == pytest.approx(dict(enumerate(wanted.tolist())), abs=1e-6)


def test_penalties_of_one_row_leave_the_others_alone():
    vocab = 33
    sampler = sampler_of(
        vocab,
        request(0, GREEDY),
        request(1, Sampling(temperature=0.0, repetition_penalty=50.0), prompt=range(vocab - 1)),
        request(2, Sampling(temperature=0.0, logit_bias=((0, 100.0),))),
        request(3, GREEDY, min_new_tokens=3, stop_token_ids=frozenset([8])),
        request(4, Sampling(temperature=0.0, presence_penalty=1.0)),
    )
    logits = torch.full((5, vocab), 1.0)
    logits[:, 8] = 2.0
    kept = logits.clone()
    assert ids(sampler.sample(range(5), logits)) == [8, 32, 0, 0, 8]
    assert torch.equal(logits, kept)


def test_a_stop_that_is_also_biased_is_still_masked():
    sampling = Sampling(temperature=0.0, logit_bias=((4, 100.0),))
    sampler = sampler_of(9, request(0, sampling, min_new_tokens=2, eos_token_ids=frozenset([4, 0])))
    logits = torch.arange(9.0)[None]
    assert [ids(sampler.sample([0], logits))[0] for _ in range(4)] == [8, 8, 4, 4]


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_tokens_of_an_allowed_set_equal_transformers(penalty):
    import transformers as hf

    vocab, prompt, eos, allowed = 90, (3, 17, 3, 41), 17, (2, 17, 40, 63, 89)
    chain = hf.LogitsProcessorList(
        [
            hf.RepetitionPenaltyLogitsProcessor(penalty),
            hf.PrefixConstrainedLogitsProcessor(lambda _batch, _history: list(allowed), num_beams=1),
            hf.MinNewTokensLengthLogitsProcessor(len(prompt), 4, eos),
        ]
    )
    sampling = Sampling(temperature=0.0, repetition_penalty=penalty, allowed_token_ids=allowed, logprobs=5)
    sampler = sampler_of(
        vocab, request(0, sampling, prompt, min_new_tokens=4, eos_token_ids=frozenset([eos]))
    )
    history = list(prompt)
    for step in range(20):
        logits = rows(1, vocab, seed=300 + step // 2, scale=1.0)
        logits[0, eos] = 6.0
        expected = chain(torch.tensor([history]), logits.clone())[0]
        (token,) = sampler.sample([0], logits)
        assert token.token_id == int(expected.argmax()) and token.token_id in allowed
        wanted = expected.log_softmax(0)
        assert token.logprob == pytest.approx(float(wanted[token.token_id]), abs=1e-6)
        assert all(math.isclose(value, float(wanted[i]), abs_tol=1e-6) for i, value in token.top)
        history.append(token.token_id)


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_allowed_set_draws_follow_its_own_distribution(filters):
    vocab, allowed, draws = 200, (0, 7, 150, 199), 2000
    logits = torch.zeros(1, vocab)
    logits[0, list(allowed)] = torch.tensor([0.5, 0.0, -0.25, 0.25]) - 3.0  # the others are likelier
    sampler = sampler_of(vocab, request(0, Sampling(seed=3, allowed_token_ids=allowed, **filters)))
    counts = torch.zeros(vocab)
    for _ in range(draws):
        counts[ids(sampler.sample([0], logits))[0]] += 1
    expected = torch.tensor([0.5, 0.0, -0.25, 0.25]).softmax(0) * draws
    assert counts[list(allowed)].sum() == draws
    if "top_p" not in filters:
        assert (
            float(((counts[list(allowed)] - expected) ** 2 / expected).sum()) < 25
        )  # chi-squared, 3 degrees


def test_an_allowed_set_binds_its_own_request_only():
    sampler = sampler_of(
        9,
        request(0, GREEDY),
        request(1, Sampling(temperature=0.0, allowed_token_ids=(2, 3))),
        request(2, GREEDY),
    )
    logits = torch.arange(9.0).repeat(3, 1)
    kept = logits.clone()
    assert ids(sampler.sample(range(3), logits)) == [8, 3, 8]
    assert torch.equal(logits, kept)
    broken = logits.clone()
    broken[1, 8] = math.nan  # outside the set, and still a broken row
    assert ids(sampler.sample(range(3), broken)) == [8, NO_TOKEN, 8]


def test_an_allowed_id_outside_the_vocabulary_is_named():
    with pytest.raises(InvalidArgument, match="allowed_token_ids = 10: must be a token id, 0 to 9"):
        Sampler(10).add(request(0, Sampling(temperature=0.0, allowed_token_ids=(1, 10))))
