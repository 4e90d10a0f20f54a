"""Which request a step takes first: priority, length, arrival."""

from __future__ import annotations

from dataclasses import replace

from tests.support.ranks.simulated_rank import make_request, shape, small_rank, stream_alone


def test_higher_priority_first_then_first_come():
    rank = small_rank(max_running=1)
    for number, priority in [(1, 0), (2, 5), (3, 0), (4, 5), (5, -1)]:
        rank.add(make_request(number, [number], max_new=1, priority=priority))
    order = [rank.step().slices[0].number for _ in range(5)]
    assert order == [2, 4, 1, 3, 5]


def test_higher_priority_preempts_prefill():
    rank = small_rank(max_step_tokens=4)
    rank.add(make_request(1, range(12)))
    rank.step()
    rank.add(make_request(2, range(3), priority=1, max_new=2))
    assert shape(rank.step()) == [(2, 0, 3, True), (1, 4, 1, False)]
    rank.finish_all()
    assert [rank.stream(n) for n in (1, 2)] == [stream_alone(rank.requests[n]) for n in (1, 2)]


def test_small_requests_do_not_overtake_a_waiting_large_one():
    rank = small_rank(kv_blocks=8)
    rank.add(make_request(1, range(16), max_new=10))  # 4 blocks, growing to 7
    rank.step()
    rank.add(make_request(2, range(20), max_new=2))  # 5 blocks: must wait for 1
    rank.step()
    rank.add(make_request(3, [1], max_new=1))
    while rank.scheduler.has_work:
        running = {s.number for s in rank.step().slices}
        assert running == {1} or 1 not in running
    assert [len(rank.events[n]) for n in (1, 2, 3)] == [10, 2, 1]


def test_a_short_prompt_does_not_wait_for_long_ones():
    rank = small_rank(max_step_tokens=4, kv_blocks=100)
    for number in (1, 2):
        rank.add(make_request(number, range(40)))
    rank.step()
    rank.add(make_request(3, range(3)))
    assert shape(rank.step()) == [(3, 0, 3, True), (1, 4, 1, False)]
    rank.finish_all()
    assert all(rank.stream(n) == stream_alone(rank.requests[n]) for n in (1, 2, 3))


def test_a_stream_that_continues_precedes_new_prompts():
    """Also shorter ones, and those that began before it came."""
    rank = small_rank(max_step_tokens=8, kv_blocks=100)
    rank.add(make_request(1, range(12)))
    rank.step()
    rank.add(make_request(2, range(3)))
    continues = make_request(3, range(10), max_new=8)
    drawn = tuple(token for token, _ in stream_alone(continues)[:5])
    rank.add(replace(continues, output_ids=drawn))
    assert shape(rank.step()) == [(3, 0, 8, False)]
    assert shape(rank.step())[0] == (3, 8, 7, True)
    rank.finish_all()
    assert rank.stream(3) == stream_alone(continues)[5:]
    assert all(rank.stream(n) == stream_alone(rank.requests[n]) for n in (1, 2))


def test_short_prompts_do_not_starve_a_long_one():
    rank = small_rank(max_step_tokens=4, kv_blocks=100, max_overtakes=3)
    rank.add(make_request(0, range(40), max_new=1))
    for number in range(1, 60):
        rank.add(make_request(number, [number] * 3, max_new=1))
        rank.step()
    assert len(rank.events[0]) == 1
    rank.finish_all()


def test_a_stream_of_high_priorities_cannot_starve_a_low_one():
    rank = small_rank(max_running=1, max_overtakes=3)
    rank.add(make_request(0, [0], max_new=1, priority=-5))
    number = 0
    while not rank.events[0]:
        number += 1
        assert number < 10
        rank.add(make_request(number, [1], max_new=1, priority=5))
        rank.step()
    assert number == 4  # three went before it


def test_overtaken_request_keeps_its_blocks_under_preemption():
    rank = small_rank(kv_blocks=6, max_running=2, max_overtakes=1)
    rank.add(make_request(1, range(4), max_new=1, priority=1))
    rank.add(make_request(2, range(4), max_new=17, priority=-1))  # 5 blocks at its end
    rank.add(make_request(3, range(4), max_new=17, priority=1))
    rank.finish_all()
    assert rank.scheduler.load().preemptions == 1
    last_steps = {s.number: i for i, batch in enumerate(rank.batches) for s in batch.slices}
    assert last_steps[2] < last_steps[3]
    assert all(rank.stream(n) == stream_alone(rank.requests[n]) for n in (1, 2, 3))
