"""KV blocks of lost ranks are copied from their memory, which is freed then. Oracle: an undisturbed run."""

from __future__ import annotations

import errno
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.engine.active_request import ActiveRequest
from ep_server.models.kv_memory import KvMemory
from ep_server.v1 import control_pb2
from tests.support.losing import (
    RANKS,
    WAIT,
    Losing,
    losing,
    run_all,
    seen,
    shortened,
    undisturbed,
)
from tests.support.models.perturbed import perturbed

TOKENS = 18  # of the longest output when a rank is lost: four full blocks and more
BLOCK = 4
BLOCKS = {"scheduler__block_size": BLOCK, "scheduler__kv_blocks": 512}
ASKED = shortened(48)


def memory(lost: Losing) -> KvMemory:
    shared: Any = lost.group()._hosts
    return shared.kv


def holds_pages(kv: KvMemory, place: int) -> bool:
    """Whether any memory is left of what a process had."""
    try:
        return os.lseek(kv.fd, place * kv.place_bytes, os.SEEK_DATA) < (place + 1) * kv.place_bytes
    except OSError:  # none up to the end
        return False


def busiest(lost: Losing, count: int) -> list[int]:
    """The ranks with the most tokens."""
    tokens = Counter[int](dict.fromkeys(range(RANKS), 0))
    for active in lost.server.engine._requests:
        tokens[active.rank] += len(active.output)
    return [rank for rank, _ in tokens.most_common(count)]


@contextmanager
def continuing(lost: Losing) -> Iterator[list[int]]:
    """Output tokens of each request that the newest recovery gave to ranks again."""
    phases, tokens = lost.server.engine._delivery.phases, list[int]()
    resumed = phases.resumed

    def noted(given: Iterable[ActiveRequest]) -> None:
        requests = list(given)
        tokens[:] = [active.output_tokens for active in requests]
        resumed(requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "resumed", noted)
        yield tokens


async def lose(
    lost: Losing, count: int, expected: Sequence[object], asked: list[dict[str, Any]] = ASKED
) -> int:
    """Kills the ranks with the most tokens. Returns: tokens that came from their memory."""
    with continuing(lost) as tokens:
        while max(tokens, default=0) < TOKENS:  # again if those requests ended before the loss was noticed
            copied = await lose_once(lost, count, expected, asked)
    return copied


async def lose_once(lost: Losing, count: int, expected: Sequence[object], asked: list[dict[str, Any]]) -> int:
    """Prefix caches are empty before: the same requests have run, and a rank that has a block copies none."""
    await lost.server.engine.flush_cache(WAIT)
    kv, before, phases = memory(lost), len(lost.heard.recovered), lost.server.engine._delivery.phases
    running = await lost.begun(asked, TOKENS + BLOCK)  # others have fewer
    ranks = busiest(lost, count)
    places = [kv._place_of[rank] for rank in ranks]
    assert all(holds_pages(kv, place) for place in places)
    for rank in ranks:
        lost.signal(rank)
    await lost.until(lambda: len(lost.heard.recovered) > before and not lost.server.engine._delivery.down)
    await lost.until(lambda: not phases._given)
    copied = phases.copied
    assert [seen(output) for output in await running] == expected
    await lost.recovered(before + 1)
    await lost.until(lambda: not kv.lost and not any(holds_pages(kv, place) for place in places))
    assert len({*kv._place_of.values()}) == RANKS
    return copied


async def counted(lost: Losing, at_least: int) -> None:
    """Until the statistics of the ranks say so too."""
    statistics = lost.server.engine.rank_statistics
    await lost.until(
        lambda: sum(each.counters.get("kv_lost_tokens", 0) for each in statistics.values()) >= at_least
    )


async def test_full_blocks_come_from_the_lost_rank() -> None:
    """One rank, another one, two at once, and all. Half of the requests bypass the prefix cache."""
    asked = [{**one, "bypass_prefix_cache": number % 2 == 0} for number, one in enumerate(ASKED)]
    async with losing(**BLOCKS) as lost:
        expected = await undisturbed(lost.client, asked)
        first = await lose(lost, 1, expected, asked)
        assert first >= TOKENS // BLOCK * BLOCK, "at least what the longest output had"
        await counted(lost, first)
        for count in (1, 2, RANKS):
            assert await lose(lost, count, expected, asked) >= TOKENS // BLOCK * BLOCK


async def test_a_second_loss_during_the_recovery_keeps_both() -> None:
    """The rank that took over is lost at once, and so is the process in the place of the first."""
    async with losing(**BLOCKS) as lost:
        expected, kv = await undisturbed(lost.client, ASKED), memory(lost)
        running = await lost.begun(ASKED, TOKENS)
        (rank,) = busiest(lost, 1)
        lost.signal(rank)
        await lost.until(lambda: len(lost.heard.recovered) == 1)
        lost.signal((rank + 1) % RANKS)
        await lost.until(lambda: len(lost.heard.recovered) == 2)
        assert [seen(output) for output in await running] == expected
        await lost.recovered(2)
        await lost.until(lambda: not kv.lost)
        running = await lost.begun(ASKED, TOKENS)
        lost.signal(rank)  # the new process with the number of the first
        assert [seen(output) for output in await running] == expected
        await lost.recovered(3)
        old = set(range(kv._places)) - {*kv._place_of.values()}
        await lost.until(lambda: not kv.lost and not any(holds_pages(kv, place) for place in old))


@pytest.mark.parametrize("fields", [{"scheduler__prefix_cache": False}, {"resilience__spare_slots": "0"}])
async def test_without_the_prefix_cache_and_without_spare_slots(fields: dict[str, Any]) -> None:
    """A name is then that of a block of one request; new processes copy as well."""
    async with losing(**BLOCKS, **fields) as lost:
        expected = await undisturbed(lost.client, ASKED)
        assert await lose(lost, 1, expected) >= TOKENS // BLOCK * BLOCK


async def test_without_memory_files_all_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.memfd_create

    def refuse(name: str, flags: int) -> int:
        if name == "ep_server_kv":
            raise OSError(errno.EMFILE, "Too many open files")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", refuse)
    async with losing(**BLOCKS) as lost:
        expected = await undisturbed(lost.client, ASKED)
        running = await lost.begun(ASKED, TOKENS)
        lost.signal(busiest(lost, 1)[0])
        assert [seen(output) for output in await running] == expected
        await lost.recovered(1)
        assert lost.server.engine._delivery.phases.copied == 0


async def test_a_rank_without_a_place_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was on standby when no more memory was to be had for what outlives it."""
    async with losing(resilience__standby=1, **BLOCKS) as lost:
        kv, truncate, hosts = memory(lost), os.ftruncate, cast("Any", lost.group()._hosts)

        def refuse(fd: int, size: int) -> None:
            if fd == kv.fd:
                raise OSError(errno.EFBIG, "File too large")
            truncate(fd, size)

        expected = await undisturbed(lost.client, ASKED)
        await lost.until(lambda: bool(hosts._standby._waiting))
        waiting = hosts._standby._waiting[0].process.pid
        monkeypatch.setattr(os, "ftruncate", refuse)
        lost.signal(1)
        await lost.recovered(1)
        assert lost.group()._board.processes[1].pid == waiting and 1 not in kv._place_of
        assert [seen(output) for output in await run_all(lost.client, ASKED)] == expected
        assert len(lost.heard.recovered) == 1, "it took part"


async def test_new_weights_copy_nothing_of_old_ones(tmp_path: Path) -> None:
    """A stream that began with other weights is prefilled; one that begins later is copied again."""
    other = perturbed(DEMO_MODEL, tmp_path / "other", share=1.0)
    async with losing(model__updates="/", **BLOCKS) as lost:
        engine, phases = lost.server.engine, lost.server.engine._delivery.phases
        long = [{**ASKED[0], "max_new_tokens": 120}]
        paths = itertools.cycle((other, DEMO_MODEL))
        with continuing(lost) as tokens:
            while max(tokens, default=0) < TOKENS:  # again if it ended before the loss was noticed
                before, running = len(lost.heard.recovered), await lost.begun(long, TOKENS + BLOCK)
                request = control_pb2.UpdateWeightsRequest(path=str(next(paths)))
                await lost.client.control.UpdateWeights(request, timeout=WAIT)
                lost.signal(next((active.rank for active in engine._requests), 0))
                await lost.until(lambda: len(lost.heard.recovered) > before and not phases._given)  # noqa: B023
                assert phases.copied == 0
                assert [len(output.token_ids) for output in await running] == [120]
                await lost.recovered(before + 1)
        expected = [seen(output) for output in await run_all(lost.client, ASKED)]
        assert await lose(lost, 1, expected) > 0
