"""The requests that run while ranks are lost, and what makes two outputs of one request equal.

Pure: draws from the generator it is given. Units: tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ep_server.client import Output
from ep_server.client.results import Tokens

Fields = Mapping[str, Any]

# Whatever a rank keeps for a request, so that another one must build it again.
KINDS: tuple[Fields, ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.2, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 1.0, "num_sequences": 2},
    {"temperature": 0.8, "top_k": 20, "output_logprobs": True, "top_n": 2, "prompt_logprobs": 1},
)
OF_TEXT: tuple[Fields, ...] = (
    {"temperature": 1.5, "stop_strings": ["0", "."]},
    {"temperature": 1.5, "regex": "[0-9]+"},
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: prompt_ids, and flat fields of decode.proto."""

    prompt_ids: list[int]
    fields: Fields


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompts are prompt[0] to prompt[1] tokens long; outputs end at `output`, or before by a stop string."""

    prompt: tuple[int, int]
    output: int


def draw_requests(
    draw: random.Random, count: int, lengths: Lengths, vocab_size: int, *, has_text: bool
) -> list[Asked]:
    """Requests of all kinds in turn. has_text: the server has a tokenizer."""
    kinds = KINDS + (OF_TEXT if has_text else ())
    found = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        ids = [draw.randrange(vocab_size) for _ in range(draw.randint(*lengths.prompt))]
        ends = "stop_strings" in kind or "regex" in kind
        common = {"max_new_tokens": lengths.output, "ignore_eos": not ends, "seed": draw.getrandbits(32)}
        found.append(Asked(ids, {**common, **kind}))
    return found


@dataclass(slots=True)
class Answer:
    """An output, and when each of its sequences got tokens, by index.

    asked: when it was asked for. moves: when it had its first token of another rank, and which.
    count: of its sequences. failed: no more tokens come. Times are of time.monotonic().
    """

    output: Output
    asked: float = 0.0
    arrivals: dict[int, list[float]] = field(default_factory=dict)
    moves: list[tuple[float, int]] = field(default_factory=list)
    count: int = 1
    failed: bool = False

    def got(self, tokens: Tokens, now: float) -> None:
        """Tokens arrived."""
        self.arrivals.setdefault(tokens.index, []).append(now)
        if tokens.rank != self.rank_at(now):
            self.moves.append((now, tokens.rank))

    def rank_at(self, time: float) -> int | None:
        """The rank that drew the last token before; the one that the request began on if there was none."""
        info = self.output.info
        first = None if info is None else info.rank
        return next((rank for at, rank in reversed(self.moves) if at <= time), first)

    @property
    def first_token(self) -> float:
        """Seconds until any sequence had one; 0 if none did."""
        times = [each[0] for each in self.arrivals.values()]
        return min(times) - self.asked if times else 0.0

    @property
    def silent_since(self) -> float:
        """The last token, or the start, of the sequence that waits longest; infinity if none waits."""
        ended = {i for i, one in enumerate(self.output.sequences) if one.finished is not None}
        left = set() if self.failed else set(range(self.count)) - ended
        return min((self.arrivals.get(i, [self.asked])[-1] for i in left), default=math.inf)

    @property
    def handed_off(self) -> bool:
        """Whether tokens of the prompt were not computed, though the prefix cache was not used."""
        finished = self.output.finished
        return finished is not None and finished.usage.cached_tokens > 0

    def gaps(self, began: float = 0.0, ended: float = math.inf) -> list[float]:
        """The longest time without a token that overlaps with these, of each sequence that has one."""
        found = []
        for times in self.arrivals.values():
            pairs = [(a, b) for a, b in pairwise(times) if b > began and a < ended]
            found += [max(b - a for a, b in pairs)] if pairs else []
        return found


def seen(output: Output, *, exact: bool) -> list[Any]:
    """All that a caller gets of the sequences, without times.

    exact: else only what rounding cannot change: how many tokens, where no stop can end them sooner.
    """
    return [_seen(one, exact=exact) for one in output.sequences]


def _seen(one: Output, *, exact: bool) -> Any:
    if one.finished is None:
        return "no end"
    usage = one.finished.usage
    counts = usage.prompt_tokens, usage.output_tokens, len(one.token_ids)
    if not exact:
        return counts
    scores = [_scores(one.logprobs), _scores(one.prompt_logprobs)]
    return counts, one.token_ids, one.text, one.finished.reason, one.finished.stop_match, scores


def _scores(logprobs: Sequence[Any]) -> list[Any]:
    return [(one.logprob, one.top) for one in logprobs]
