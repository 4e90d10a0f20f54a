"""Requests and rows for a sampler on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from ep_server.backends.cpu.sampler import Sampler
from ep_server.records import Request, SampledToken, Sampling, Stopping

GREEDY = Sampling(temperature=0.0)
SIZES = (1, 63, 64, 65, 300, 1024)
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
PENALTIES = [
    Sampling(temperature=0.0, repetition_penalty=1.3),
    Sampling(temperature=0.0, repetition_penalty=0.7),
    Sampling(temperature=0.0, logit_bias=((5, 4.0), (9, -math.inf), (0, -2.5))),
    Sampling(temperature=0.0, repetition_penalty=1.2, logit_bias=((17, 1.5),)),
]


@pytest.fixture
def one_thread() -> Iterator[None]:
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
