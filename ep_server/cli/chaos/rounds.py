"""One round of `ep-server chaos`: all requests at once, compared with an undisturbed run. Units: seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any

from ep_server.cli.chaos.faults import Faults
from ep_server.cli.chaos.report import LOST, Report
from ep_server.cli.chaos.streams import Answer, Asked, seen
from ep_server.client import AsyncClient, AsyncStream, Output
from ep_server.errors import DeadlineExceeded, EpServerError

Ask = Callable[..., Awaitable[AsyncStream]]  # prompt and fields -> the stream


def direct(client: AsyncClient) -> Ask:
    """Requests without a hand-off."""

    async def ask(prompt: Sequence[int], **fields: Any) -> AsyncStream:
        return client.generate(prompt, **fields)

    return ask


def in_turn(*asks: Ask) -> Ask:
    """Each request in the next of these ways."""
    turns = cycle(asks)

    async def ask(prompt: Sequence[int], **fields: Any) -> AsyncStream:
        return await next(turns)(prompt, **fields)

    return ask


class HostHits:
    """Prompt tokens that only host tiers held. A rank that starts again counts from 0."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        self._clients = clients
        self._last: dict[tuple[int, int], int] = {}  # (client, rank) -> tokens

    async def look(self) -> int:
        """Those since the last call, as far as ranks have reported them."""
        found = 0
        for number, client in enumerate(self._clients):
            with suppress(EpServerError):  # a server that is being started again
                for rank in (await client.loads()).ranks:
                    key, now = (number, rank.rank), rank.prefix_host_hits
                    before = self._last.get(key, 0)
                    found += now - before if now >= before else now
                    self._last[key] = now
        return found


async def answers_of(
    ask: Ask, asked: Sequence[Asked], seconds: float, begun: list[Answer]
) -> list[Answer | BaseException]:
    """Runs all requests at once. They end once none of them has had a token for so long.

    begun: gets the answers as they begin, in the place of what it holds.
    """
    begun.clear()
    tasks = [asyncio.ensure_future(_answer(ask, one, begun)) for one in asked]
    before, tokens = -1, 0
    try:
        while tokens != before and not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=seconds)
            before, tokens = tokens, sum(len(times) for each in begun for times in each.arrivals.values())
    finally:
        for task in tasks:
            task.cancel()
    silent = DeadlineExceeded(f"no stream has had a token for {seconds:g} s")
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [silent if isinstance(one, asyncio.CancelledError) else one for one in found]


async def _answer(ask: Ask, one: Asked, begun: list[Answer]) -> Answer:
    began = time.monotonic()
    stream = await ask(one.prompt_ids, **one.fields)
    answer = Answer(stream.output, began, count=one.fields.get("num_sequences", 1))
    begun.append(answer)
    try:
        async for tokens in stream:
            answer.got(tokens, time.monotonic())
    except EpServerError:
        answer.failed = True
        raise
    return answer


def whole(answer: Answer | BaseException) -> Answer:
    """The answer. Raises: the error that ended it."""
    if isinstance(answer, BaseException):
        raise answer
    return answer


def compare(
    found: Sequence[Answer | BaseException],
    asked: Sequence[Asked],
    expected: Sequence[Output],
    report: Report,
) -> list[Answer]:
    """What a round has given, with the undisturbed run. Returns: those that were answered to the end."""
    answers = []
    report.rounds += 1
    for number, (answer, undisturbed) in enumerate(zip(found, expected, strict=True)):
        report.streams += 1
        name = f"round {report.rounds}, stream {number}, {dict(asked[number].fields)}"
        if isinstance(answer, BaseException):
            if not isinstance(answer, EpServerError):
                raise answer
            report.errors.append(f"{name}: {answer}")
            continue
        answers.append(answer)
        report.same_tokens += _ids(answer.output) == _ids(undisturbed)
        report.first_tokens["losses"].append(answer.first_token)
        report.handed_off += answer.handed_off and asked[number].fields.get("bypass_prefix_cache", False)
        if _shown(answer.output, asked[number], report) != _shown(undisturbed, asked[number], report):
            report.differences.append(name)
    return answers


def _ids(output: Output) -> list[list[int]]:
    return [each.token_ids for each in output.sequences]


def _shown(output: Output, asked: Asked, report: Report) -> Any:
    """What must be equal. Where rounding differs, the length of an output that a text may end is free."""
    free = not report.exact and not asked.fields["ignore_eos"]
    return len(output.sequences) if free else seen(output, exact=report.exact)


def add_gaps(report: Report, answer: Answer, faults: Faults) -> None:
    """Counts the longest gap of each sequence during each loss or change; else its longest one at all.

    A stream that has moved counts as one of its new rank once it had a token there.
    """
    met = False
    for change in faults.changes.done:
        gaps = answer.gaps(change.began, change.ended)
        report.gaps["change"] += gaps
        met = met or bool(gaps)
    for loss in faults.losses:
        gaps = answer.gaps(loss.began, loss.ended)
        report.gaps[LOST[2 if loss.alone else answer.rank_at(loss.began) not in loss.ranks]] += gaps
        met = met or bool(gaps)
    if not met:
        report.gaps["undisturbed"] += answer.gaps()
