"""Evicted prefixes come back from the host: what is found, copied, kept while it is read, and forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_server.errors import InternalError
from ep_server.scheduler.host_tier import HostSlots
from tests.support.ranks.simulated_rank import SimulatedRank, make_request, small_rank, stream_alone

HISTORY = [token % 5 for token in range(24)]


def rank_of(**changes) -> SimulatedRank:
    tier = {"max_running": 4, "kv_blocks": 10, "prefix_cache": True, "host_blocks": 32}
    return small_rank(**{**tier, **changes})


def after_eviction(**changes) -> SimulatedRank:
    """A rank that answered HISTORY, and then others until its cache held nothing of it."""
    rank = rank_of(**changes)
    rank.add(make_request(1, HISTORY, max_new=1))
    rank.finish_all()
    for number in (2, 3):
        rank.add(make_request(number, [6 + number] * 36, max_new=1))
        rank.finish_all()
    return rank


def second_turn(rank: SimulatedRank) -> int:
    """Asks for one token after HISTORY and more. Returns: the prompt tokens found in a cache."""
    rank.add(make_request(9, [*HISTORY, 7, 7, 7], max_new=4))
    rank.finish_all()
    assert rank.stream(9) == stream_alone(rank.requests[9])
    return rank.events[9][0].cached_tokens


def test_second_turn_loads_an_evicted_history():
    rank = after_eviction()
    before = rank.scheduler.load()
    assert second_turn(rank) == 24
    load = rank.scheduler.load()
    assert load.prefix_hits - before.prefix_hits == 24
    assert load.prefix_host_hits - before.prefix_host_hits == 24
    assert rank.copier.loaded_blocks == 6
    assert load.host_blocks_total == 32
    assert 6 + 9 <= load.host_blocks_used <= rank.copier.saved


def test_without_a_host_tier_nothing_is_moved():
    rank = after_eviction(host_blocks=0)
    assert second_turn(rank) == 0
    assert rank.scheduler.moves() is None
    assert rank.copier.saved == 0


def test_a_block_is_saved_once():
    rank = rank_of()
    for number in range(3):
        rank.add(make_request(number, HISTORY, max_new=1))
        rank.finish_all()
    rank.launch()
    assert rank.copier.saved == 6


def test_cached_head_and_loaded_tail_join():
    rank = rank_of()
    rank.add(make_request(1, HISTORY, max_new=1))
    rank.finish_all()
    rank.add(make_request(2, [9] * 26, max_new=1))  # evicts the tail of the history: tails go first
    rank.finish_all()
    assert second_turn(rank) == 24
    assert 0 < rank.scheduler.load().prefix_host_hits < 24


def test_others_step_while_a_history_is_loaded():
    rank = after_eviction(kv_blocks=14)
    rank.add(make_request(4, [1], max_new=8))
    rank.step()
    rank.add(make_request(9, [*HISTORY, 7], max_new=2))
    numbers = [[piece.number for piece in rank.step().slices] for _ in range(3)]
    assert numbers == [[4], [4, 9], [4, 9]]
    rank.finish_all()
    assert all(rank.stream(number) == stream_alone(rank.requests[number]) for number in (4, 9))


def test_cancel_during_a_load_frees_its_blocks():
    rank = after_eviction()
    rank.add(make_request(9, [*HISTORY, 7], max_new=2))
    assert not rank.scheduler.plan().slices
    moves = rank.scheduler.moves()
    assert moves is not None
    rank.copier.start(moves)
    assert rank.scheduler.cancel(9)
    rank.scheduler.check_integrity()
    rank.add(make_request(5, [3] * 38, max_new=2))  # it needs the blocks that are still being loaded
    rank.finish_all()
    assert rank.stream(5) == stream_alone(rank.requests[5])


def test_flush_forgets_the_host_too():
    rank = after_eviction()
    rank.scheduler.flush_cache()
    assert rank.scheduler.load().host_blocks_used == 0
    assert second_turn(rank) == 0


def test_a_bypassing_request_is_neither_saved_nor_loaded():
    rank = rank_of()
    rank.add(make_request(1, HISTORY, max_new=1, bypass_prefix_cache=True))
    rank.finish_all()
    rank.launch()
    assert rank.copier.saved == 0


def test_unknown_load_is_refused():
    with pytest.raises(InternalError, match="no load 7"):
        rank_of().scheduler.loaded([7])


def digest(name: int) -> bytes:
    return bytes([name])


operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 9)),
        st.tuples(st.just("take"), st.integers(0, 4)),
        st.tuples(st.just("read"), st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True)),
        st.tuples(st.just("end"), st.integers(0, 3)),
        st.tuples(st.just("touch"), st.lists(st.integers(0, 9), max_size=4)),
        st.tuples(st.just("clear"), st.none()),
    ),
    min_size=10,
    max_size=60,
)


@given(st.integers(1, 5), operations)
def test_slots_hold_what_their_digest_says(num_slots, steps):
    """Every slot that is found, or still read, holds the bytes that were last saved for its digest."""
    slots, held = HostSlots(num_slots), dict[int, int]()
    reads: list[dict[int, int]] = []  # slot -> name
    for kind, argument in steps:
        if kind == "take":
            slot = slots.take(digest(argument))
            if slot is not None:
                assert not any(slot in read for read in reads), "a slot that is read was overwritten"
                held[slot] = argument
        elif kind == "read":
            found = slots.find(map(digest, argument))
            slots.read(found)
            reads.append(dict(zip(found, argument, strict=False)))
        elif kind == "end" and argument < len(reads):
            slots.end_read(reads.pop(argument))
        elif kind == "touch":
            slots.touch([digest(name) for name in argument])
        elif kind == "clear":
            slots.clear()
            assert slots.used == 0
        slots.check_integrity()
        for name in range(10):
            for slot in slots.find([digest(name)]):
                assert held[slot] == name
        assert all(held[slot] == name for read in reads for slot, name in read.items())


def test_least_recently_used_slot_goes_first():
    slots = HostSlots(3)
    for name in range(3):
        slots.take(digest(name))
    slots.touch([digest(0), digest(1)])  # a prefix: 0 is its head
    slots.take(digest(3))
    slots.take(digest(4))
    assert [bool(slots.find([digest(name)])) for name in range(5)] == [True, False, False, True, True]


def test_a_slot_that_is_read_is_not_given_up():
    slots = HostSlots(2)
    first, second = slots.take(digest(1)), slots.take(digest(2))
    assert first is not None
    slots.read([first])
    assert slots.take(digest(3)) == second
    slots.read([second])
    assert slots.take(digest(4)) is None
    slots.clear()
    assert slots.take(digest(5)) is None
    slots.end_read([first])
    assert slots.take(digest(5)) == first


def test_blocks_are_shown_to_other_servers_once_they_are_loaded():
    rank = after_eviction()
    rank.add(make_request(9, [*HISTORY, 7, 7, 7], max_new=4, hold=bytes(16)))
    assert not rank.scheduler.plan().slices
    (shown,) = rank.scheduler.handoffs.exports()
    assert (shown.tokens, shown.planned) == (0, 0)
    moves = rank.scheduler.moves()
    assert moves is not None
    rank.copier.start(moves)
    rank.scheduler.loaded(rank.copier.loaded())
    assert [(each.tokens, each.planned) for each in rank.scheduler.handoffs.exports()] == [(24, 24)]
