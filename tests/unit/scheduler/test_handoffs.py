"""Blocks kept for another server and blocks awaited from one: who owns them, and for how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ep_server.records import KvSource, Request, SampledToken, Sampling, Stopping
from ep_server.scheduler.batch import SchedulerLimits
from ep_server.scheduler.handoffs import HoldEnd, KvFetch
from ep_server.scheduler.rank_scheduler import RankScheduler

KEY = bytes(16)
SOURCE = KvSource("there:1", "", KEY, 10)
UNNEEDED = KvFetch(0, SOURCE, 0, (), 0)


def scheduler(**limits: Any) -> RankScheduler:
    values = {"max_running": 4, "max_step_tokens": 8, "block_size": 4, "kv_blocks": 8}
    return RankScheduler(SchedulerLimits(**{**values, "prefix_cache": True, "max_context": 64, **limits}))


def request(number: int, length: int = 10, new: int = 1, **fields: Any) -> Request:
    ids = tuple((number * 7 + n) % 50 for n in range(length))
    return Request(f"r{number}", number, ids, Sampling(temperature=0.0), Stopping(new), **fields)


def step(of: RankScheduler) -> list[int]:
    """Plans and commits one step. Returns: the first position of each slice."""
    batch = of.plan()
    drawn = [SampledToken(piece.number, 1) for piece in batch.slices if piece.sample]
    starts = [piece.start for piece in batch.slices]
    of.commit(batch, drawn)
    of.check_integrity()
    return starts


def test_blocks_are_shown_as_they_are_computed_and_then_held() -> None:
    of = scheduler()
    of.add(request(1, hold=KEY))
    assert [(e.tokens, e.blocks) for e in of.handoffs.exports()] == [(0, ())]
    step(of)
    ((first,), _) = of.handoffs.exports(), None
    assert (first.tokens, len(first.blocks), first.held) == (8, 3, False)
    step(of)
    (held,) = of.handoffs.exports()
    assert (held.tokens, held.blocks, held.held) == (10, first.blocks, True)
    assert not of.has_work and of.load().kv_blocks_used == 3
    assert of.load().kv_blocks_held == 3
    assert of.handoffs.end(1, HoldEnd.FETCHED) == 3 and of.handoffs.end(1, HoldEnd.FETCHED) == 0
    assert of.handoffs.ends == {HoldEnd.FETCHED: 1} and of.load().kv_blocks_held == 0
    assert of.load().kv_blocks_used == 0 and not of.handoffs.exports()
    of.check_integrity()


def test_a_cancelled_request_holds_nothing() -> None:
    of = scheduler()
    of.add(request(1, hold=KEY))
    step(of)
    of.cancel(1)
    assert not of.handoffs.exports() and of.load().kv_blocks_used == 0


def test_held_blocks_are_released_by_key() -> None:
    of = scheduler()
    of.add(request(1, length=4, hold=KEY))
    step(of)
    assert of.handoffs.release(bytes(15) + b"x") == 0 and of.handoffs.release(KEY) == 1
    assert of.handoffs.ends == {HoldEnd.RELEASED: 1}
    of.check_integrity()


def test_the_oldest_hold_makes_room() -> None:
    of = scheduler(kv_blocks=8)
    for number in (1, 2):
        of.add(request(number, hold=bytes([number]) * 16))
        step(of), step(of)
    of.add(request(3, length=14))  # four blocks; two are left
    step(of)
    assert [export.number for export in of.handoffs.exports()] == [2]
    assert of.handoffs.ends == {HoldEnd.GIVEN_UP: 1}


def test_blocks_that_a_sequence_uses_too_are_not_held() -> None:
    """They stay in use if the hold ends, so they are no room for others."""
    of = scheduler()
    of.add(request(1, hold=KEY))
    step(of), step(of)
    of.add(replace(request(1, new=4), number=2))
    step(of)
    assert of.load().kv_blocks_held == 1


def test_a_flush_forgets_held_blocks() -> None:
    of = scheduler()
    of.add(request(1, hold=KEY))
    step(of), step(of)
    of.flush_cache()
    assert of.handoffs.ends == {HoldEnd.FLUSHED: 1}
    assert not of.handoffs.exports() and of.load().kv_blocks_used == 0
    of.check_integrity()


def test_a_sequence_waits_for_its_fetch_and_goes_on() -> None:
    of = scheduler()
    of.add(request(1, source=SOURCE))
    assert step(of) == []
    dropped, (fetch,) = of.handoffs.take()
    assert not dropped and (fetch.first, len(fetch.blocks), fetch.source) == (0, 3, SOURCE)
    assert fetch.tokens == 9  # the last one is run in any case
    of.handoffs.arrived(fetch.ticket, 9)
    of.loaded([fetch.ticket])
    assert step(of) == [9]


def test_what_did_not_arrive_is_computed() -> None:
    """Nothing is fetched twice."""
    of = scheduler()
    of.add(request(1, source=SOURCE))
    step(of)
    (fetch,) = of.handoffs.take()[1]
    of.handoffs.arrived(fetch.ticket, 7)
    of.loaded([fetch.ticket])
    assert step(of) == [7] and of.handoffs.take() == ([], [])


def test_only_what_the_cache_does_not_have_is_fetched() -> None:
    of = scheduler()
    of.add(request(1, length=5))
    step(of)
    of.add(request(1, source=SOURCE))
    step(of)
    (fetch,) = of.handoffs.take()[1]
    assert (fetch.first, len(fetch.blocks), fetch.tokens) == (4, 2, 5)


def test_an_unneeded_source_is_told_to_free_its_blocks() -> None:
    of = scheduler()
    of.add(request(1))
    step(of), step(of)
    of.add(request(1, source=SOURCE._replace(tokens=8)))
    assert step(of) == [8]
    (fetch,) = of.handoffs.take()[1]
    assert (fetch.ticket, fetch.blocks) == (0, ())


def test_other_weights_are_not_fetched() -> None:
    of = scheduler()
    of.flush_cache(weights=1)
    of.add(request(1, source=SOURCE))
    assert step(of) == [0] and not of.handoffs.take()[1][0].blocks


def test_a_cancelled_fetch_is_dropped_before_the_next_step() -> None:
    of = scheduler()
    of.add(request(1, source=SOURCE))
    step(of)
    (fetch,) = of.handoffs.take()[1]
    of.cancel(1)
    assert of.handoffs.take() == ([fetch.ticket], [UNNEEDED])
    of.handoffs.arrived(fetch.ticket, 8)  # it ended meanwhile
    of.loaded([fetch.ticket])
    of.check_integrity()


def test_a_fetch_that_never_began_is_forgotten() -> None:
    """Also of a request that waits in the queue: the other server may free its blocks."""
    of = scheduler()
    of.add(request(1, source=SOURCE))
    step(of)
    of.add(request(2, source=SOURCE))
    of.cancel(1)
    of.cancel(2)
    assert of.handoffs.take()[1] == [UNNEEDED, UNNEEDED]


def test_a_stream_that_continues_runs_beside_a_fetch_that_ended() -> None:
    """Nothing else runs meanwhile, also no prompt of a higher priority."""
    of = scheduler(kv_blocks=16)
    of.add(request(1, source=SOURCE, priority=1))
    assert step(of) == []
    (fetch,) = of.handoffs.take()[1]
    of.add(request(2, length=20, new=4, output_ids=(3,)))
    assert step(of) == [0]
    of.handoffs.arrived(fetch.ticket, 8)
    of.loaded([fetch.ticket])
    assert [step(of) for _ in range(3)] == [[8], [16], [21, 8]]


def test_blocks_of_a_step_in_flight_are_not_shown() -> None:
    """Another prompt shares them as soon as that step is planned."""
    of = scheduler(ahead=1, max_step_tokens=12, kv_blocks=16)
    first = request(1)
    of.add(first)
    of.add(replace(first, number=2, request_id="r2", hold=KEY))
    maker = of.plan()
    of.plan()
    (shown,) = of.handoffs.exports()
    assert (shown.tokens, shown.planned, len(shown.blocks)) == (0, 10, 3)
    of.commit(maker, [SampledToken(1, 1)])
    assert of.handoffs.exports() == [shown._replace(tokens=8)]


def test_fetched_blocks_are_shown_once_they_are_there() -> None:
    """Of a server that fetches and sends."""
    of = scheduler()
    of.add(request(1, length=5))
    step(of)
    of.add(request(1, source=SOURCE, hold=KEY))
    step(of)
    (fetch,) = of.handoffs.take()[1]
    (shown,) = of.handoffs.exports()
    assert (shown.tokens, shown.planned, len(shown.blocks)) == (4, 4, 3)
    of.handoffs.arrived(fetch.ticket, 5)
    of.loaded([fetch.ticket])
    assert [(e.tokens, e.planned) for e in of.handoffs.exports()] == [(9, 9)]
