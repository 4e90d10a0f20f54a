"""The sampler against transformers' logits processors, plain torch, and itself without neighbours."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from ep_server.backends.cpu import sampling_ops as ops
from ep_server.backends.cpu.sampler import Sampler, UniformStream
from ep_server.errors import InternalError, InvalidArgument
from ep_server.records import NO_TOKEN, Request, SampledToken, Sampling, Stopping

if TYPE_CHECKING:
    import transformers as hf

GREEDY = Sampling(temperature=0.0)
SIZES = (1, 63, 64, 65, 300, 1024)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def request(number: int, sampling: Sampling, prompt=(1, 2, 3), **stopping) -> Request:
    return Request(
        f"r{number}", number, tuple(prompt), sampling, Stopping(**{"max_new_tokens": 999, **stopping})
    )


def rows(n: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sampler_of(vocab: int, *requests: Request) -> Sampler:
    sampler = Sampler(vocab)
    for each in requests:
        sampler.add(each)
    return sampler


def ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


# --- choosing ---


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


# --- filters and penalties against transformers ---

FILTERS = [
    Sampling(seed=1, temperature=0.6),
    Sampling(seed=1, temperature=3.0),
    Sampling(seed=1, top_k=1),
    Sampling(seed=1, top_k=7),
    Sampling(seed=1, top_k=5000),
    Sampling(seed=1, top_p=0.3),
    Sampling(seed=1, top_p=0.9),
    Sampling(seed=1, top_p=0.999),
    Sampling(seed=1, top_p=1e-6),
    Sampling(seed=1, min_p=0.02),
    Sampling(seed=1, min_p=1.0),
    Sampling(seed=1, temperature=1.7, top_k=40, top_p=0.8, min_p=0.05),
    Sampling(seed=1, temperature=4.0, top_k=290, top_p=0.97),
    Sampling(seed=1, temperature=9.0, top_p=0.97, min_p=0.001),
]


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


PENALTIES = [
    Sampling(temperature=0.0, repetition_penalty=1.3),
    Sampling(temperature=0.0, repetition_penalty=0.7),
    Sampling(temperature=0.0, logit_bias=((5, 4.0), (9, -math.inf), (0, -2.5))),
    Sampling(temperature=0.0, repetition_penalty=1.2, logit_bias=((17, 1.5),)),
]


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


# --- allowed tokens ---


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


# --- log probabilities ---


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


# --- independence ---

MIXED = [
    *FILTERS,
    *PENALTIES,
    GREEDY,
    Sampling(seed=9, temperature=0.8, presence_penalty=0.4, frequency_penalty=0.1, top_p=0.9, logprobs=2),
    Sampling(seed=2**64 - 1, repetition_penalty=1.1, logit_bias=((3, 2.0),), logprobs=5),
    Sampling(seed=-5, temperature=1.3, min_p=0.01),
    Sampling(seed=6, temperature=1.1, top_k=9, allowed_token_ids=(1, 2, 30), logprobs=1),
]


def run_alone(sampling: Sampling, number: int, vocab: int, steps: int) -> list[SampledToken]:
    sampler = sampler_of(vocab, request(number, sampling))
    return [sampler.sample([number], step_logits(number, step, vocab))[0] for step in range(steps)]


def step_logits(number: int, step: int, vocab: int) -> torch.Tensor:
    return rows(1, vocab, seed=1000 * number + step, scale=2.0)


@pytest.mark.parametrize("vocab", [65, 1024])
def test_tokens_do_not_depend_on_the_neighbours_bit_for_bit(vocab):
    """Every step runs another random subset, in another order: as under preemption and chunked prefill."""
    steps = 8
    alone = {n: run_alone(sampling, n, vocab, steps) for n, sampling in enumerate(MIXED)}
    sampler = sampler_of(vocab, *(request(n, sampling) for n, sampling in enumerate(MIXED)))
    done = {n: [] for n in alone}
    generator = torch.Generator().manual_seed(17)
    while unfinished := [n for n in done if len(done[n]) < steps]:
        chosen = [n for n in unfinished if torch.rand((), generator=generator) < 0.6]
        chosen = [chosen[i] for i in torch.randperm(len(chosen), generator=generator)]
        logits = [step_logits(n, len(done[n]), vocab) for n in chosen]
        tokens = sampler.sample(chosen, torch.cat(logits) if logits else torch.empty(0, vocab))
        for number, token in zip(chosen, tokens, strict=True):
            done[number].append(token)
    assert done == alone  # ids, log probabilities and alternatives, exactly


def test_a_stream_continues_after_tokens_drawn_elsewhere():
    vocab = 200
    for number, sampling in enumerate(MIXED):
        whole = run_alone(sampling, number, vocab, 70)
        sampler = Sampler(vocab)
        sampler.add(request(number, sampling), output=[token.token_id for token in whole[:66]])
        rest = [sampler.sample([number], step_logits(number, step, vocab))[0] for step in range(66, 70)]
        assert rest == whole[66:]


def test_the_seed_alone_decides():
    vocab, sampling = 500, Sampling(seed=42)
    first = run_alone(sampling, 3, vocab, 30)
    assert run_alone(sampling, 3, vocab, 30) == first
    assert ids(run_alone(replace(sampling, seed=43), 3, vocab, 30)) != ids(first)


def test_uniforms_go_by_position():
    everything = [UniformStream(5).at(i) for i in range(200)]
    stream = UniformStream(5)
    assert [stream.at(i) for i in (0, 0, 63, 64, 199)] == [everything[i] for i in (0, 0, 63, 64, 199)]
    assert len(set(everything)) == 200 and all(0 <= u < 1 for u in everything)


# --- bad input ---


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
