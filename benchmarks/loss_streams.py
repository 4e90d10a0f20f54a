"""The streams that rank_loss.py runs, and the gaps between their tokens. Seconds of time.monotonic()."""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ep_server.cli.chaos.streams import Answer, Asked, seen
from ep_server.client import AsyncClient, Output
from ep_server.errors import EpServerError

STAGGER = 3.0  # in which all streams begin
WORST = 5  # longest gaps that are described


@dataclass(frozen=True, slots=True)
class Lost:
    """Ranks lost at a time; since: from when on a gap counts."""

    ranks: frozenset[int]
    at: float
    since: float


@dataclass(slots=True)
class Load:
    """Streams without a break, each compared as it ends."""

    client: AsyncClient
    asked: Sequence[Asked]
    exact: bool
    draw: random.Random
    expected: list[Output] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    open: dict[int, Answer] = field(default_factory=dict)
    _running: asyncio.Task[Any] | None = None
    _over: bool = False

    async def once(self) -> None:
        """The undisturbed run, whose outputs the others must equal."""
        self.expected = [answer.output for answer in await asyncio.gather(*map(self._answer, self.asked))]

    def begin(self) -> None:
        """Starts as many streams as there are requests, one after the other."""
        self._over = False
        self._running = asyncio.gather(*(self._stream(number) for number in range(len(self.asked))))

    async def end(self) -> None:
        """Until every stream that has begun ends."""
        self._over = True
        assert self._running is not None
        await self._running

    async def resumed(self) -> None:
        """Until every stream that is open now has had another token, or has ended."""
        now = time.monotonic()
        waiting = dict(self.open)
        while waiting := {key: one for key, one in waiting.items() if key in self.open and newest(one) < now}:
            await asyncio.sleep(0.02)

    async def _stream(self, number: int) -> None:
        await asyncio.sleep(self.draw.uniform(0.0, STAGGER))
        while not self._over:
            await self._compare(number)
            number = self.draw.randrange(len(self.asked))

    async def _compare(self, number: int) -> None:
        name = f"request {number}, {dict(self.asked[number].fields)}"
        try:
            answer = await self._answer(self.asked[number])
        except EpServerError as error:
            self.problems.append(f"{name}: {error}")
            return
        want, have = (seen(o, exact=self.exact) for o in (self.expected[number], answer.output))
        if want != have:
            self.problems.append(
                f"{name}, id {answer.output.info and answer.output.info.request_id}: differs"
            )
        self.answers.append(answer)

    async def _answer(self, one: Asked) -> Answer:
        stream = self.client.generate(one.prompt_ids, **one.fields)
        answer = Answer(stream.output)
        self.open[id(answer)] = answer
        try:
            async for tokens in stream:
                answer.got(tokens, time.monotonic())
        finally:
            del self.open[id(answer)]
        return answer


def newest(answer: Answer) -> float:
    """When a stream had its last token."""
    return max((times[-1] for times in answer.arrivals.values()), default=0.0)


def gaps(
    load: Load, losses: Sequence[Lost], moves: Mapping[str, Sequence[tuple[float, int]]]
) -> tuple[dict[str, list[float]], list[str]]:
    """The longest gap of every sequence from each loss to the next one, by whose it was at the loss.

    Of sequences that had a token before; a gap over several losses counts for the first one.
    moves: by request, when it got which other rank. Returns: the gaps, and a line for each of the longest.
    """
    found: dict[str, list[float]] = {"other ranks": [], "lost rank": []}
    lines: list[tuple[float, str]] = []
    for answer in load.answers:
        info = answer.output.info
        assert info is not None
        for index, times in answer.arrivals.items():
            for number, (longest, at) in _longest(times, losses).items():
                loss = losses[number]
                at_rank = [to for when, to in moves.get(info.request_id, []) if when < loss.at]
                rank = [info.rank, *at_rank][-1]
                found["lost rank" if rank in loss.ranks else "other ranks"].append(longest)
                where = (
                    f"loss {number} of {sorted(loss.ranks)}, {at - loss.at:+.2f} s, request {info.request_id}"
                )
                text = f"{where} of {info.prompt_tokens} tokens, sequence {index}, token {times.index(at)}"
                lines.append((longest, f"{longest:.3f} s: {text}, at rank {rank}"))
    return found, [text for _, text in heapq.nlargest(WORST, lines)]


def _longest(times: Sequence[float], losses: Sequence[Lost]) -> dict[int, tuple[float, float]]:
    """By number of the loss: the longest gap of one sequence, and when it began."""
    found: dict[int, tuple[float, float]] = {}
    begun = [loss.at for loss in losses]
    for a, b in pairwise(times):
        number = bisect_right(begun, a)  # the first loss after a
        number -= number == len(begun) or begun[number] > b
        if number >= 0 and times[0] < begun[number]:
            gap = max(0.0, b - max(a, losses[number].since))
            found[number] = max(found.get(number, (0.0, a)), (gap, a))
    return found


def undisturbed(load: Load, until: float) -> list[float]:
    """The longest gap of each sequence before the first loss."""
    early = [
        [b - a for a, b in pairwise(times) if b < until]
        for answer in load.answers
        for times in answer.arrivals.values()
    ]
    return [max(each) for each in early if each]
