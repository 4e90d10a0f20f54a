"""The table of requests notices when it and the requests disagree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ep_server.engine.active_request import ActiveRequest
from ep_server.engine.admission import Asked, Crowd
from ep_server.engine.request_table import RequestTable
from ep_server.engine.stream import TokenStream
from ep_server.errors import InternalError
from ep_server.records import RankReady, Request, Sampling, Stopping
from ep_server.scheduler.lifecycle import State

READY = [RankReady(rank, 0, 8, 16, 0, 0, 0, 0.0) for rank in range(2)]


def active(number: int, rank: int = 0, prompt: int = 20, priority: int = 0, name: str = "") -> ActiveRequest:
    stopping = Stopping(max_new_tokens=4)
    request = Request(name or str(number), number, (1,) * prompt, Sampling(), stopping, priority)
    return ActiveRequest(request, rank, None, TokenStream(8, 1, lambda _: None), 0.0)


def table() -> tuple[RequestTable, ActiveRequest, ActiveRequest]:
    made, first, second = RequestTable(2), active(1), active(2, rank=1)
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


def test_losses_count_against_what_a_rank_worked_on() -> None:
    """Once each: the process that starts in its place has begun nothing, and may be lost too."""
    made, running, other = table()
    adding, queued = active(3), active(4)
    made.add(adding)
    made.add(queued)
    made.begin(0, [], adding=4)
    made.begin(0, [1])  # request 4 is in the queue
    made.begin(0, [], adding=3)
    for losses in (1, 2):
        made.lost(0)
        assert [each.suspected for each in (running, adding, queued, other)] == [1, 1, 0, 0]
        assert [each.losses for each in (running, adding, queued, other)] == [losses, losses, losses, 0]
    made.begin(0, [], adding=3)
    made.lost(1)
    made.lost(0)
    assert [each.suspected for each in (running, adding, queued, other)] == [1, 2, 0, 0]
    made.check_integrity()


@pytest.mark.parametrize(
    ("ready", "ranks", "run"),
    [((1, 2), [2, 2, 1], {1: 80, 2: 60}), ((0, 1, 2), [2, 0, 0], {0: 60, 1: 50, 2: 30})],
)
def test_requests_of_a_lost_rank_are_spread(
    ready: tuple[int, ...], ranks: list[int], run: dict[int, int]
) -> None:
    """Also over what an earlier loss has left to run again, and over a new process in its place."""
    made = RequestTable(3)
    lost, again = [active(number, prompt=30) for number in (1, 2, 3)], active(4, rank=1, prompt=50)
    for each in (*lost, again, active(5, rank=2, prompt=60)):
        made.add(each)
    for each in (*lost, again):
        each.losses = 1
    again.submitted = True
    tokens = made.run_again()
    assert tokens == {1: 50}
    for each in lost:
        made.give(each, [replace(READY[0], rank=rank) for rank in ready], tokens)
    made.check_integrity()
    assert [each.rank for each in lost] == ranks
    assert tokens == run


@pytest.mark.parametrize(("rank", "hold"), [(0, b"key"), (1, b"")])
def test_a_handle_is_kept_at_the_same_rank_only(rank: int, hold: bytes) -> None:
    """It names the rank."""
    made, first, _ = table()
    first.request = replace(first.request, hold=b"key")
    made.move([first], rank)
    made.check_integrity()
    assert (first.rank, first.request.dp_rank, first.request.hold) == (rank, rank, hold)


def test_a_shared_prompt_is_counted_once() -> None:
    """Until the last of its sequences is freed, in whatever order."""
    made, sequences = RequestTable(1), [active(number, prompt=32) for number in (1, 2, 3)]
    for each in sequences:
        each.request = replace(each.request, group=1)
        made.add(each)
    made.check_integrity()
    assert made.loads(READY[:1])[0].kv_blocks_used == 2
    for each, left in zip(sequences, (32, 32, 0), strict=True):
        each.state, each.cancelled_at = State.CANCELLED, 1.0
        made.ended(each)
        made.freed(each)
        made.check_integrity()
        assert made.ranks[0].tokens == left


def test_who_waits_ahead_and_who_behind() -> None:
    made = RequestTable(2)
    requests = [
        active(number, rank, priority=priority)
        for number, (rank, priority) in enumerate([(0, 1), (0, 0), (1, 0), (0, 2), (0, 0)])
    ]
    for each in requests:
        made.add(each)
    requests[1].state = State.RUNNING
    made.started(requests[1])
    made.grew(requests[1])
    assert made.crowd(Asked(priority=0)) == Crowd(5, 5, ahead=5, behind=0)
    assert made.crowd(Asked(priority=2)) == Crowd(5, 5, ahead=2, behind=3)
    assert made.crowd(Asked(priority=2, dp_rank=0)) == Crowd(5, 4, ahead=2, behind=2)
    assert made.behind(Asked(priority=2), 2) == [requests[4], requests[2]]  # not 1, which runs
    assert made.behind(Asked(priority=2, dp_rank=0), 2) == [requests[4], requests[0]]
    assert made.behind(Asked(priority=2), 4) == []
    made.check_integrity()


def test_sequences_of_one_request_leave_together() -> None:
    made = RequestTable(1)
    pair = [active(number, name="pair") for number in (1, 2)]
    begun = [active(number, name="begun") for number in (3, 4)]
    for each in [*pair, *begun]:
        made.add(each)
    begun[0].state = State.RUNNING
    made.started(begun[0])
    made.grew(begun[0])
    assert made.behind(Asked(priority=1), 1) == pair
    assert made.behind(Asked(priority=1), 3) == []


def ended_without_the_table(made: RequestTable, first: ActiveRequest) -> None:
    first.state = State.FINISHED


def counted_twice(made: RequestTable, first: ActiveRequest) -> None:
    made.ranks[0].waiting += 1


def grown_alone(made: RequestTable, first: ActiveRequest) -> None:
    first.output_tokens += 1


def stream_over(made: RequestTable, first: ActiveRequest) -> None:
    first.stream.close()


def never_cancelled(made: RequestTable, first: ActiveRequest) -> None:
    first.state = State.CANCELLED
    made.ended(first)


@pytest.mark.parametrize(
    "damage", [ended_without_the_table, counted_twice, grown_alone, stream_over, never_cancelled]
)
def test_every_disagreement_is_found(damage: Callable[[RequestTable, ActiveRequest], None]) -> None:
    made, first, _ = table()
    damage(made, first)
    with pytest.raises(InternalError):
        made.check_integrity()
