"""Ranks that are stopped (SIGSTOP) during hand-offs: few requests wait for them, and none ends otherwise."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from tests.support.frontend import WAIT, parked
from tests.support.handoff.servers import (
    Running,
    continued,
    held,
    nothing_held,
    pair,
    prefilling,
    serving,
)
from tests.support.ports import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")
LENGTH = 75
FIELDS: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True, "temperature": 0.0}
QUICK = {"handoff__silence_seconds": 1.0, "scheduler__block_size": 7}
PATIENT = {"exchange__timeout_seconds": WAIT}  # with a rank that is stopped
SLOW = {"scheduler__max_step_tokens": 1, "handoff__stall_seconds": 1.0}  # many steps
MANY = 10  # times a prompt: its prefill takes longer than the reports that show it

Pair = tuple[Running, Running]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[Pair]:
    options = {**PATIENT, "scheduler__kv_blocks": 1024}
    async with pair({**SLOW, **options}, {**QUICK, **options}) as both:
        yield both


def prompt(number: int) -> list[int]:
    """Nobody has it in the prefix cache."""
    return [number // 13, number % 13, *((5 * n + n * n) % 13 for n in range(2, LENGTH))]


@contextmanager
def stopped(server: Running, rank: int = 0) -> Iterator[None]:
    """As if a rank hung."""
    pid = server.ranks.pids[rank]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # killed meanwhile
            os.kill(pid, signal.SIGCONT)


async def all_continued(server: Running, handles: dict[int, Any], times: int = 1) -> list[Any]:
    """Outputs of requests at once. handles: by number of the prompt, which is repeated so many times."""
    calls = [
        continued(server, prompt(number) * times, handle, bypass_prefix_cache=True, **FIELDS)
        for number, handle in handles.items()
    ]
    return list(await asyncio.gather(*calls))


async def all_fetched(prefill: Running, decode: Running, numbers: list[int], times: int = 1) -> list[Any]:
    """Outputs of requests whose blocks moved; asked for again where a busy machine looked like silence."""
    async with asyncio.timeout(WAIT):
        while True:
            handles = {number: await held(prefill, prompt(number) * times) for number in numbers}
            outputs = await all_continued(decode, handles, times)
            if [each.finished.usage.cached_tokens for each in outputs] == [LENGTH * times - 1] * len(numbers):
                return outputs


class Waited(NamedTuple):
    """Fetches that waited for a rank in vain, and those that did not wait for it."""

    failed: int
    skipped: int


def waited(decode: Running) -> Waited:
    return Waited(decode.count("handoffs/failed"), decode.count("handoffs/skipped"))


async def all_reported(decode: Running, count: int) -> Waited:
    """Once there are so many of both."""
    async with asyncio.timeout(WAIT):
        while sum(waited(decode)) < count:
            await asyncio.sleep(0.01)
    return waited(decode)


async def moving(prefill: Running, sent: int, calls: asyncio.Task[Any]) -> bool:
    """Waits until more bytes have left than before, or the requests have ended. Returns: whether."""
    async with asyncio.timeout(WAIT):
        while prefill.count("handoff_bytes/sent") <= sent and not calls.done():
            await asyncio.sleep(0.01)
    return prefill.count("handoff_bytes/sent") > sent


async def check(server: Running, numbers: Iterable[int], outputs: list[Any], times: int = 1) -> None:
    """They are those of the server alone. numbers, times: of the prompts."""
    for number, output in zip(numbers, outputs, strict=True):
        ids = prompt(number) * times
        alone = await server.client.complete(ids, timeout=WAIT, bypass_prefix_cache=True, **FIELDS)
        assert output.token_ids == alone.token_ids


async def test_few_requests_wait_for_a_hung_rank(servers: Pair) -> None:
    """Several at once, then more; it is used again when it goes on, and frees what nobody fetched.

    One of the first may come late, and need not wait any more.
    """
    prefill, decode = servers
    handles = {number: await held(prefill, prompt(number)) for number in range(8)}
    await parked(decode.server)
    before = waited(decode)
    with stopped(prefill):
        outputs = await all_continued(decode, {number: handles[number] for number in range(4)})
        first = await all_reported(decode, sum(before) + 4)
        assert first.failed > before.failed
        outputs += await all_continued(decode, {number: handles[number] for number in range(4, 8)})
        then = await all_reported(decode, sum(first) + 4)
        assert then == first._replace(skipped=first.skipped + 4)
    await check(decode, handles, outputs)
    assert not any(each.finished.usage.cached_tokens for each in outputs)
    await nothing_held(prefill)
    await check(decode, [20, 21], await all_fetched(prefill, decode, [20, 21]))


async def test_a_rank_that_hangs_during_its_prefill_is_left(servers: Pair) -> None:
    """Both requests wait for its layers when it stops. A new request does not wait."""
    prefill, decode = servers
    whole = MANY * LENGTH - 1
    cached, moved = [whole], False
    while whole in cached or not moved:  # again if all was fetched before the signal, or silence
        sent = prefill.count("handoff_bytes/sent")
        async with (
            prefilling(prefill, prompt(30) * MANY, bypass_prefix_cache=True) as one,
            prefilling(prefill, prompt(31) * MANY, bypass_prefix_cache=True) as two,
        ):
            calls = asyncio.create_task(all_continued(decode, {30: one, 31: two}, MANY))
            moved = await moving(prefill, sent, calls)
            with stopped(prefill):
                outputs = await calls
                outputs += await all_continued(decode, {30: one}, MANY)
            await check(decode, [30, 31, 30], outputs, MANY)
        cached = [each.finished.usage.cached_tokens for each in outputs]
        await nothing_held(prefill)


async def test_a_slow_prefill_is_awaited(servers: Pair) -> None:
    """For longer than the decode server waits for a rank that sends nothing."""
    prefill, decode = servers
    ids = prompt(40) * MANY
    alone = await decode.client.complete(ids, timeout=WAIT, bypass_prefix_cache=True, **FIELDS)
    cached = 0
    async with asyncio.timeout(2 * WAIT):
        while cached < len(ids) - 1:  # again if a busy machine looked like silence
            async with prefilling(prefill, ids, bypass_prefix_cache=True) as handle:
                output = await continued(decode, ids, handle, bypass_prefix_cache=True, **FIELDS)
            assert output.token_ids == alone.token_ids
            cached = output.finished.usage.cached_tokens
    await nothing_held(prefill)


async def test_a_rank_whose_partner_hangs_ends_hand_offs() -> None:
    """It runs no step, and says so: the decode server itself would wait for minutes."""
    options = {**SLOW, "parallel__ranks": 2, **PATIENT}
    async with pair(options, {"handoff__silence_seconds": 3 * WAIT}) as (prefill, decode):
        async with prefilling(prefill, prompt(1), dp_rank=0) as handle:
            with stopped(prefill, 1):
                outputs = [(await all_continued(decode, {1: handle}))[0] for _ in range(3)]
        await check(decode, [1] * 3, outputs)
        await nothing_held(prefill)


async def test_a_hung_decode_rank_stops_no_prefill(servers: Pair) -> None:
    """It stops while it fetches. Its request is served once it goes on, and all blocks are freed."""
    prefill, decode = servers
    whole = MANY * LENGTH - 1
    cached = [whole, 0]
    async with asyncio.timeout(2 * WAIT):
        while not cached[0] < cached[1] == whole:  # again if all was fetched before the signal, or silence
            sent = prefill.count("handoff_bytes/sent")
            async with prefilling(prefill, prompt(50) * MANY, bypass_prefix_cache=True) as handle:
                call = asyncio.create_task(all_continued(decode, {50: handle}, MANY))
                await moving(prefill, sent, call)
                with stopped(decode):
                    other = await held(prefill, prompt(51) * MANY, bypass_prefix_cache=True)
                outputs = await call + await all_continued(decode, {51: other}, MANY)
            await check(decode, [50, 51], outputs, MANY)
            cached = [each.finished.usage.cached_tokens for each in outputs]
    await nothing_held(prefill)


@pytest.mark.slow
async def test_a_rank_replaced_while_it_hangs_is_used() -> None:
    """The new process has its port."""
    options = {"handoff__port": free_port(), **PATIENT}
    async with serving("decode", **QUICK) as decode:
        async with serving("prefill", **options) as prefill:
            handle = await held(prefill, prompt(1))
            handle.local = ""
            with stopped(prefill):
                outputs = await all_continued(decode, {1: handle})
                os.kill(prefill.ranks.pids[0], signal.SIGKILL)
        async with serving("prefill", **options) as prefill:
            outputs += await all_continued(decode, {1: handle})
            last = await held(prefill, prompt(2))
            last.local = ""
            outputs += await all_continued(decode, {2: last})
        await check(decode, [1, 1, 2], outputs)
        assert [each.finished.usage.cached_tokens for each in outputs] == [0, 0, LENGTH - 1]
