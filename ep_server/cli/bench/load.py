"""What a benchmark asks: prompts, lengths, arrivals. The same for any number of client processes. Pure.

Poisson arrivals are an open loop: the schedule is drawn before anything is sent, and no answer, however late,
moves an arrival. A closed loop keeps `concurrency` requests in flight: an answer lets the next one go.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ep_server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Load:
    """rate: arrivals per second, 0 = closed loop of `concurrency` streams.

    vocab_size: prompts are drawn from ids 0 to vocab_size - 1. stream_interval: tokens of one message.
    timeout: seconds that one request may take.
    """

    requests: int
    concurrency: int
    rate: float
    prompt_tokens: int
    new_tokens: int
    vocab_size: int
    seed: int = 0
    stream_interval: int = 1
    timeout: float = 600.0


def prompt(load: Load, index: int) -> list[int]:
    """Token ids of request `index`; those below 0 are warm-up."""
    source = random.Random(f"{load.seed} prompt {index}")
    return [source.randrange(load.vocab_size) for _ in range(load.prompt_tokens)]


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Times of `count` arrivals, seconds from the start, ascending: gaps are exponential of mean 1 / rate."""
    source, time, times = random.Random(f"{seed} arrivals"), 0.0, []
    for _ in range(count):
        time += source.expovariate(rate)
        times.append(time)
    return times


def shares(count: int, parts: int) -> list[int]:
    """`count` split over `parts` as evenly as it goes; the first ones get one more."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def check_length(prompt_tokens: int, new_tokens: int, context: int) -> None:
    """context: longest prompt and output of the model, tokens. Raises: ConfigError."""
    length = prompt_tokens + new_tokens
    if length > context:
        raise ConfigError("--prompt-tokens + --new-tokens", length, f"at most {context}, the context")
