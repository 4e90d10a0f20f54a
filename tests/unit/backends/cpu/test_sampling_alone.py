"""A request draws the same tokens whatever runs beside it, and after a move."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep_server.backends.cpu.sampler import Sampler, UniformStream
from ep_server.records import SampledToken, Sampling
from tests.support.sampling import FILTERS, GREEDY, PENALTIES, ids, request, rows, sampler_of

pytestmark = pytest.mark.usefixtures("one_thread")


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
