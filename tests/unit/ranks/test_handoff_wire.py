"""A fetcher and a holder of rows in one process: every byte, every kind of memory, and how a fetch ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_server.backends.kv_copies import CpuCopies
from ep_server.backends.kv_rows import CpuRows, HostSlots, Kind
from ep_server.ranks.handoff.desk import HandoffDesk
from ep_server.ranks.handoff.exporter import KvExporter
from ep_server.ranks.handoff.importer import KvImporter
from ep_server.ranks.handoff.wire import (
    Moved,
)
from ep_server.records import KvSource, Request, SampledToken, Sampling, Stopping
from ep_server.scheduler import RankScheduler, SchedulerLimits
from ep_server.scheduler.handoffs import HoldEnd, KvExport, KvFetch
from tests.support.handoff.wire import KEY, PARTS, WAIT, WIDTH, Cache, exporter_of, fetched, lanes, rows_of


@pytest.mark.parametrize("local", [True, False], ids=["shared", "tcp"])
def test_rows_land_where_they_belong(there: tuple[Cache, KvExporter], local: bool) -> None:
    """Between blocks of 5 and of 7 tokens, from token 7 on; nothing else is written."""
    cache, exporter = there
    blocks, mine = (9, 3, 30, 17, 8, 2), (4, 0, 7)
    exporter.show([KvExport(1, KEY, 29, blocks, held=True)])
    own = Cache(9, 7, fill=0xEE)
    source = KvSource(exporter.address, exporter.local if local else "", KEY, 29)
    assert fetched(KvImporter(rows_of(own), WAIT, 5), KvFetch(-1, source, 7, mine, 21)) == 21
    assert torch.equal(own.rows(mine), cache.rows(blocks)[7:28])
    others = tuple(block for block in range(9) if block not in mine)
    assert (own.rows(others) == 0xEE).all()
    end = time.monotonic() + WAIT
    while not (finished := exporter.finished()):
        assert time.monotonic() < end
    assert finished == [(1, HoldEnd.FETCHED)]
    counters = exporter.counters()
    assert counters.pop("handoff_hold_ns") > 0
    assert counters == {"handoffs/sent": 1, "handoff_bytes/sent": 21 * PARTS * WIDTH}


@pytest.mark.parametrize(
    "options", [{}, {"disorder": 7}, {"strict_memory": True}], ids=["", "disorder", "nic"]
)
def test_rows_are_written_over_libfabric(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In more slots than there are, between blocks of 5 and of 7 tokens; also as strict networks do it."""
    monkeypatch.setattr("ep_server.ranks.handoff.lanes.HOST_SLOT_BYTES", 4 * PARTS * WIDTH)
    far, cache = lanes(**options), Cache(40, 5)
    exporter = exporter_of(cache, far)
    blocks, mine = (9, 3, 30, 17, 8, 2), (4, 0, 7)
    exporter.show([KvExport(1, KEY, 29, blocks, held=True)])
    own = Cache(9, 7, fill=0xEE)
    importer, source = KvImporter(rows_of(own), WAIT, 5, far), KvSource(exporter.address, "", KEY, 29)
    assert fetched(importer, KvFetch(-1, source, 7, mine, 21)) == 21
    assert torch.equal(own.rows(mine), cache.rows(blocks)[7:28])
    others = tuple(block for block in range(9) if block not in mine)
    assert (own.rows(others) == 0xEE).all()
    assert importer.counters()["handoff_fetches/libfabric"] == 1
    exporter.close()


@pytest.mark.parametrize("holder", [True, False], ids=["holder", "fetcher"])
def test_tcp_where_one_side_has_no_libfabric(there: tuple[Cache, KvExporter], holder: bool) -> None:
    cache, exporter = there
    far = lanes()
    if holder:
        exporter = exporter_of(cache, far)
    exporter.show([KvExport(1, KEY, 5, (1,), held=True)])
    own = Cache(2, 5, fill=0)
    importer = KvImporter(rows_of(own), WAIT, 5, None if holder else far)
    assert fetched(importer, KvFetch(-1, KvSource(exporter.address, "", KEY, 5), 0, (1,), 5)) == 5
    assert torch.equal(own.rows((1,)), cache.rows((1,)))
    assert importer.counters()["handoff_fetches/tcp"] == 1
    exporter.close()


class Unreachable(CpuRows):
    """Those of a GPU that cannot map the other one's memory."""

    def attach(self, kind: Kind, rows: int, count: int, descriptor: int) -> HostSlots:
        if kind is not Kind.PRIVATE:
            self.kind = Kind.PRIVATE
            raise RuntimeError("no peer access")
        return super().attach(kind, rows, count, descriptor)


def test_memory_out_of_reach_is_not_tried_again(there: tuple[Cache, KvExporter]) -> None:
    """The same fetch goes on with memory of another kind."""
    cache, exporter = there
    exporter.show([KvExport(1, KEY, 5, (1,), held=True)])
    own = Cache(2, 5, fill=0)
    rows = Unreachable(own)  # type: ignore[arg-type]
    source = KvSource(exporter.address, exporter.local, KEY, 5)
    importer = KvImporter(rows, WAIT, 5)
    assert fetched(importer, KvFetch(-1, source, 0, (1,), 5)) == 5
    assert torch.equal(own.rows((1,)), cache.rows((1,)))
    counts = importer.counters()
    assert counts["handoff_fetches/tcp"] == counts["handoffs/received"] == 1


def test_rows_follow_the_computation(there: tuple[Cache, KvExporter]) -> None:
    cache, exporter = there
    own, blocks = Cache(4, 5, fill=0), (1, 2, 3, 4)
    exporter.show([KvExport(1, KEY, 3, blocks[:1], held=False)])
    importer = KvImporter(rows_of(own), WAIT, 5)
    importer.start([KvFetch(-1, KvSource(exporter.address, exporter.local, KEY, 20), 0, (0, 1, 2), 15)])
    for tokens in (5, 12, 20):
        time.sleep(0.05)
        assert not importer.ended()
        exporter.show([KvExport(1, KEY, tokens, blocks, held=tokens == 20)])
    end = time.monotonic() + WAIT
    while not (ended := importer.ended()):
        assert time.monotonic() < end
    assert ended == [(-1, 15)] and torch.equal(own.rows((0, 1, 2)), cache.rows(blocks)[:15])


def test_layers_move_while_their_step_runs(there: tuple[Cache, KvExporter]) -> None:
    """Each part as soon as it is written; the rest, once tokens are computed."""
    cache, exporter = there
    own, blocks = Cache(4, 5, fill=0), (1, 2, 3)
    expected = [part.view(-1, WIDTH)[5:20] for part in cache.tensors]
    importer = KvImporter(rows_of(own), WAIT, 5)
    importer.start([KvFetch(-1, KvSource(exporter.address, exporter.local, KEY, 15), 0, (0, 1, 2), 15)])
    exporter.show([KvExport(1, KEY, 0, blocks, held=False, planned=12)], step=True)
    end = time.monotonic() + WAIT
    for layer in range(PARTS - 1):
        cache.progress.written(layer)
        while not torch.equal(own.tensors[layer].view(-1, WIDTH)[:12], expected[layer][:12]):
            assert time.monotonic() < end
        assert own.tensors[layer].view(-1, WIDTH)[12:].eq(0).all() and own.tensors[-1].eq(0).all()
    exporter.show([KvExport(1, KEY, 12, blocks, held=False, planned=15)], step=True)
    cache.progress.written(0)
    exporter.show([KvExport(1, KEY, 15, blocks, held=True, planned=15)])
    while not (ended := importer.ended()):
        assert time.monotonic() < end
    assert ended == [(-1, 15)] and torch.equal(own.rows((0, 1, 2)), cache.rows(blocks))


def test_runs_of_rows_are_kept_in_order() -> None:
    """Compared with a count of parts for every row, over many pieces of many sizes."""
    for most in (1, 2, 5, 50):
        moved, counts = Moved(3, 40, 6), [0] * 37
        for tokens, planned, written in (
            (0, 9, 2),
            (0, 9, 4),
            (7, 30, 1),
            (20, 30, 5),
            (29, 40, 3),
            (40, 40, 0),
        ):
            while (rows := moved.next(tokens, planned, written, most, 1)) is not None:
                assert moved.fits(rows, most) and rows.count * rows.parts <= most * 6
                assert not moved.fits(replace(rows, part=rows.part + 1), most)
                for at in range(rows.first - 3, rows.first - 3 + rows.count):
                    assert counts[at] == rows.part
                    counts[at] += rows.parts
                moved.add(rows)
                whole = next((n for n, count in enumerate(counts) if count < 6), 37)
                assert moved.whole == whole
            for at, count in enumerate(counts, 3):
                assert count >= (6 if at < tokens else written if at < planned else 0)
        assert moved.complete and counts == [6] * 37


def test_what_arrived_before_the_end_counts(there: tuple[Cache, KvExporter]) -> None:
    cache, exporter = there
    own, blocks = Cache(4, 5, fill=0), (1, 2, 3)
    exporter.show([KvExport(1, KEY, 10, blocks, held=False)])
    importer = KvImporter(rows_of(own), WAIT, 5)
    importer.start([KvFetch(-1, KvSource(exporter.address, "", KEY, 15), 0, (0, 1, 2), 15)])
    end = time.monotonic() + WAIT
    while own.rows((1,))[-1].eq(0).all():
        assert time.monotonic() < end
    exporter.show([])  # cancelled
    while not (ended := importer.ended()):
        assert time.monotonic() < end
    assert ended == [(-1, 10)] and torch.equal(own.rows((0, 1)), cache.rows(blocks)[:10])
    assert importer.counters()["handoffs/failed"] == 1


def test_a_rank_that_runs_no_step_is_not_awaited() -> None:
    """It waits for others to be replaced. One that has everything need not run any."""
    cache = Cache(4, 5)
    exporter = exporter_of(cache, stall=0.3)
    other = bytes(reversed(KEY))
    running = [KvExport(n, key, 5, (1, 2), held=False, planned=10) for n, key in ((1, KEY), (2, other))]
    exporter.show(running, step=True)
    source, own = KvSource(exporter.address, exporter.local, KEY, 10), Cache(2, 5, fill=0)
    importer = KvImporter(rows_of(own), WAIT, 30)
    assert fetched(importer, KvFetch(-1, source._replace(key=other), 0, (1,), 5)) == 5
    assert fetched(importer, KvFetch(-2, source, 0, (0, 1), 10)) == 5
    over = set[int]()
    end = time.monotonic() + WAIT
    while 1 not in over and time.monotonic() < end:  # the fetcher says that it does not come again
        over |= {number for number, _ in exporter.finished()}
        time.sleep(0.01)
    assert over == {1, 2}
    exporter.close()


def test_a_dropped_fetch_writes_nothing_more(there: tuple[Cache, KvExporter]) -> None:
    _, exporter = there
    own = Cache(4, 5, fill=0xEE)
    exporter.show([KvExport(1, KEY, 0, (), held=False)])
    importer = KvImporter(rows_of(own), WAIT, 5)
    importer.start([KvFetch(-1, KvSource(exporter.address, exporter.local, KEY, 15), 0, (0, 1, 2), 15)])
    importer.drop([-1])
    exporter.show([KvExport(1, KEY, 15, (1, 2, 3), held=True)])
    time.sleep(0.3)
    assert (own.rows((0, 1, 2, 3)) == 0xEE).all() and importer.ended() == []


def test_blocks_are_saved_before_a_fetch_fills_them(there: tuple[Cache, KvExporter]) -> None:
    """Blocks that are evicted in the plan that has them copied to host memory."""
    _, exporter = there
    exporter.show([KvExport(1, KEY, 10, (1, 2), held=True)])
    limits = SchedulerLimits(4, 8, 4, 3, prefix_cache=True, max_context=64, host_blocks=8)
    own, scheduler = Cache(3, 4), RankScheduler(limits)
    copier, importer = CpuCopies(own, 8), KvImporter(rows_of(own), WAIT, 5)  # type: ignore[arg-type]
    desk = HandoffDesk(scheduler.handoffs, None, importer)
    scheduler.add(Request("r1", 1, (5,) * 8, Sampling(temperature=0.0), Stopping(1)))
    batch = scheduler.plan()
    computed = own.rows(tuple(batch.slices[0].blocks)).clone()
    scheduler.commit(batch, [SampledToken(1, 1)])
    source = KvSource(exporter.address, exporter.local, KEY, 10)
    scheduler.add(Request("r2", 2, (6,) * 10, Sampling(temperature=0.0), Stopping(1), source=source))
    assert not scheduler.plan().slices

    def start_copies() -> None:
        if importer.runs:
            importer.wait(WAIT)
        moves = scheduler.moves()
        assert moves is not None and len(moves.saves) == 2
        copier.start(moves)
        slots = [slot for _, slot in moves.saves]
        assert torch.equal(torch.cat([part[slots].view(-1, WIDTH) for part in copier._host], 1), computed)

    desk.after_plan(start_copies)
    end = time.monotonic() + WAIT
    while not desk.before_plan():
        assert time.monotonic() < end
