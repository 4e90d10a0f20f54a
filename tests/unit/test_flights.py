"""The table of requests notices when it and the requests disagree."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ep_server.errors import InternalError
from ep_server.flight import Flight
from ep_server.flights import FlightTable
from ep_server.records import RankReady, Request, Sampling, Stopping
from ep_server.scheduler.lifecycle import State
from ep_server.stream import TokenStream

READY = [RankReady(rank, 0, 8, 16, 0, 0, 0, 0.0) for rank in range(2)]


def flight(number: int, rank: int = 0, prompt: int = 20) -> Flight:
    request = Request(str(number), number, (1,) * prompt, Sampling(), Stopping(max_new_tokens=4))
    return Flight(request, rank, None, TokenStream(8, 1, lambda _: None), 0.0)


def table() -> tuple[FlightTable, Flight, Flight]:
    made, first, second = FlightTable(2), flight(1), flight(2, rank=1)
    made.add(first)
    made.add(second)
    made.check_integrity()
    return made, first, second


def test_a_request_goes_through_the_table() -> None:
    made, first, _ = table()
    assert [(r.waiting, r.running, r.tokens) for r in made.ranks] == [(1, 0, 20), (1, 0, 20)]
    first.state = State.RUNNING
    made.started(first)
    made.grew(first)
    made.check_integrity()
    load = made.loads(READY)[0]
    assert (load.running, load.waiting, load.kv_blocks_used, load.kv_blocks_total) == (1, 0, 2, 8)
    first.state, first.cancelled_at = State.CANCELLED, 1.0
    made.ended(first)
    made.check_integrity()
    assert made.with_id("1") == () and made.with_number(1) is first and len(made) == 2
    made.freed(first)
    made.check_integrity()
    assert len(made) == 1 and made.ranks[0].in_flight == made.ranks[0].tokens == 0


def ended_without_the_table(made: FlightTable, first: Flight) -> None:
    first.state = State.FINISHED


def counted_twice(made: FlightTable, first: Flight) -> None:
    made.ranks[0].waiting += 1


def grown_alone(made: FlightTable, first: Flight) -> None:
    first.output_tokens += 1


def stream_over(made: FlightTable, first: Flight) -> None:
    first.stream.close()


def never_cancelled(made: FlightTable, first: Flight) -> None:
    first.state = State.CANCELLED
    made.ended(first)


@pytest.mark.parametrize(
    "damage", [ended_without_the_table, counted_twice, grown_alone, stream_over, never_cancelled]
)
def test_every_disagreement_is_found(damage: Callable[[FlightTable, Flight], None]) -> None:
    made, first, _ = table()
    damage(made, first)
    with pytest.raises(InternalError):
        made.check_integrity()
