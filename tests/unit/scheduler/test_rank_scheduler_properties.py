"""Random requests, limits, cancels and interleavings: every stream is the one the request has alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ep_server.records import KvSource, Request
from ep_server.scheduler import SchedulerLimits
from ep_server.scheduler.batch import AUTO_BUDGET
from ep_server.scheduler.cache_reporter import CacheReporter
from ep_server.scheduler.handoffs import HoldEnd
from tests.support.ranks.cache_mirror import CacheMirror
from tests.support.ranks.simulated_rank import SimulatedRank, make_request, stream_alone

limits = st.builds(
    SchedulerLimits,
    max_running=st.integers(1, 5),
    max_step_tokens=st.integers(1, 12),
    block_size=st.integers(1, 5),
    kv_blocks=st.integers(5, 14),
    prefix_cache=st.booleans(),
    max_context=st.just(1000),
    max_overtakes=st.integers(1, 4),
    ahead=st.integers(0, 2),
    host_blocks=st.sampled_from([0, 0, 2, 7, 30]),
    itl_budget_ns=st.sampled_from([0, 0, AUTO_BUDGET, 1]),
)
# Few distinct tokens, so that prompts share prefixes.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@st.composite
def requests(draw: st.DrawFn, number: int, room: int) -> Request:
    """A request that fits `room` cache places."""
    prompt = draw(prompts)[:room]
    max_new = draw(st.integers(1, max(1, min(12, room + 1 - len(prompt)))))
    return make_request(
        number,
        prompt,
        max_new,
        min_new=draw(st.integers(0, max_new)),
        eos=draw(st.sets(st.integers(0, 12), max_size=2)),
        stops=draw(st.sets(st.integers(0, 12), max_size=1)),
        priority=draw(st.integers(-1, 1)),
        cache_salt=draw(st.sampled_from(["", "a"])),
        bypass_prefix_cache=draw(st.booleans()),
        scores=draw(st.sampled_from([None, None, 0, 2])),
    )


@st.composite
def handed_off(draw: st.DrawFn, number: int, room: int) -> Request:
    """The same, and other servers may fetch its blocks, or have them."""
    request, key = draw(requests(number, room)), number.to_bytes(16, "big")
    source = KvSource("", "", key, draw(st.integers(1, len(request.prompt_ids))))
    return replace(
        request, hold=draw(st.sampled_from([b"", key])), source=draw(st.sampled_from([None, source]))
    )


def siblings_of(first: Request, count: int) -> list[Request]:
    """The sequences of one call: only the first scores the prompt."""
    sampling, start = replace(first.sampling, prompt_logprobs=None), first.number
    rest = replace(first, group=start, sampling=sampling, hold=b"", source=None)
    others = [replace(rest, number=start + n) for n in range(1, count)]
    return [replace(first, group=start), *others] if others else [first]


def room_of(given_limits: SchedulerLimits) -> int:
    return given_limits.kv_blocks * given_limits.block_size


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, cancels, steps and loses steps in any order, also between plan and commit.

    The simulated cache raises when a sequence sees a token, salt or position that is not its own. A mirror
    that gets the events alone holds what the prefix cache holds.
    """

    @initialize(chosen=limits)
    def start(self, chosen):
        self.rank = SimulatedRank(chosen)
        self.dropped: Counter[int] = Counter()
        self.number = 0
        self.mirror = CacheMirror()
        self.reporter = CacheReporter(0, self.rank.scheduler, self.mirror.apply, lambda: 0.0)

    @rule(on=st.booleans())
    def watch(self, on):
        self.mirror.complete = False
        self.reporter.watch(on=on)

    @rule()
    def flush(self):
        held = sum(len(stored.block_hashes) for stored in self.rank.scheduler.cache_contents())
        assert self.rank.scheduler.flush_cache() >= held  # more: of sequences of one request alone
        assert self.rank.scheduler.load().kv_blocks_cached == 0

    @rule(data=st.data(), count=st.sampled_from([1, 1, 2, 4]))
    def add(self, data, count):
        first = data.draw(handed_off(self.number + 1, room_of(self.rank.limits)))
        self.number += count
        for request in siblings_of(first, count):
            self.rank.add(request)
            if data.draw(st.booleans()):  # commands may arrive one by one
                self.step()

    def step(self):
        if len(self.rank.in_flight) > self.rank.limits.ahead:
            self.settle()
        self.launch()

    @precondition(lambda self: len(self.rank.in_flight) <= self.rank.limits.ahead)
    @rule()
    def launch(self):
        had_work, awaits_tokens = self.rank.scheduler.has_work, bool(self.rank.in_flight)
        batch = self.rank.launch()
        assert bool(batch.slices) == had_work or awaits_tokens

    @precondition(lambda self: len(self.rank.in_flight) <= self.rank.limits.ahead and self.number)
    @rule(data=st.data())
    def launch_late(self, data):
        self.rank.launch(data.draw(st.sets(st.integers(1, self.number), min_size=1, max_size=3)))

    @precondition(lambda self: self.rank.in_flight)
    @rule()
    def settle(self):
        self.rank.settle()

    @rule(written=st.booleans())
    def lose_steps(self, written):
        """Another rank was lost: the steps in flight never end, and every stream goes on as if they had."""
        self.rank.lose_steps(written=written)

    @rule(number=st.integers(1, 20), right=st.integers(0, 20))
    def hand_off(self, number, right):
        """Another server has fetched what it needs. right: tokens that arrive of what this one fetches."""
        self.rank.scheduler.handoffs.end(number, HoldEnd.FETCHED)
        self.rank.fetch_right = right

    @rule()
    def lose_a_planned_step(self):
        """It was planned but did not begin: nothing of it is written."""
        if len(self.rank.in_flight) <= self.rank.limits.ahead:
            self.rank.scheduler.plan()
            self.rank.lose_steps()

    @rule(right=st.integers(0, 20))
    def lose_rank(self, right):
        """Another one takes over, and copies what the names of the lost one name. Some of it may be gone."""
        lost, self.rank = self.rank, SimulatedRank(self.rank.limits)
        self.rank.lost_right = right
        lost.freed += [n for n, kind in self.dropped.items() if kind == 1 and lost.scheduler.is_live(n)]
        self.rank.take_over(lost, self.dropped)
        self.mirror = CacheMirror()
        self.reporter = CacheReporter(0, self.rank.scheduler, self.mirror.apply, lambda: 0.0)

    @precondition(lambda self: self.number > 0)
    @rule(data=st.data(), fails=st.booleans())
    def drop(self, data, fails):
        number = data.draw(st.integers(1, self.number))
        ended = self.ended(number)
        known = (self.rank.scheduler.fail if fails else self.rank.scheduler.cancel)(number)
        assert known <= (not ended)
        if known and not self.dropped[number]:
            self.dropped[number] = -1 if fails else 1

    def ended(self, number: int) -> bool:
        events = self.rank.events[number]
        return bool(events) and events[-1].finish is not None

    @invariant()
    def sound(self):
        if not hasattr(self, "rank"):
            return
        self.rank.scheduler.check_integrity()
        self.rank.freed += self.rank.scheduler.freed()
        assert not self.rank.named_wrongly() and not self.rank.shown_wrongly()
        self.reporter.publish()
        if self.mirror.complete:
            assert self.mirror.blocks == self.rank.cached_blocks()
        for number, request in self.rank.requests.items():
            seen = self.rank.stream(number)
            assert seen == stream_alone(request)[: len(seen)]
            if self.ended(number):
                assert not self.dropped[number]

    def teardown(self):
        if not hasattr(self, "rank"):
            return
        self.rank.finish_all()
        self.sound()
        for number, request in self.rank.requests.items():
            if not self.dropped[number]:
                assert self.rank.stream(number) == stream_alone(request)
        cancelled = [number for number, kind in self.dropped.items() if kind == 1]
        assert sorted(self.rank.freed) == sorted(cancelled)


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestSchedulerMachine = SchedulerMachine.TestCase


@st.composite
def workloads(draw: st.DrawFn) -> tuple[SchedulerLimits, list[Request]]:
    chosen, added = draw(limits), list[Request]()
    for count in draw(st.lists(st.sampled_from([1, 1, 1, 3]), min_size=1, max_size=6)):
        added += siblings_of(draw(requests(len(added) + 1, room_of(chosen))), count)
    return chosen, added


@settings(max_examples=120)
@given(workloads())
def test_limits_change_the_steps_but_no_stream(workload):
    """Chunking, batching, preemption, prefix cache on or off: the same tokens, each request ends once."""
    chosen, added = workload
    variants = [
        chosen,
        replace(chosen, prefix_cache=not chosen.prefix_cache),
        replace(chosen, max_step_tokens=1, max_running=1),
        replace(chosen, max_step_tokens=500, max_running=50, kv_blocks=500),
        replace(chosen, ahead=1 - min(chosen.ahead, 1)),
        replace(chosen, host_blocks=40),
    ]
    for variant in variants:
        rank = SimulatedRank(variant)
        for request in added:
            rank.add(request)
        rank.finish_all()
        for request in added:
            events = rank.events[request.number]
            assert rank.stream(request.number) == stream_alone(request)
            assert sum(event.finish is not None for event in events) == 1
            assert 0 <= events[0].cached_tokens < len(request.prompt_ids)
            scores = request.sampling.prompt_logprobs is not None
            own = request.group in (0, request.number)
            if own and (request.bypass_prefix_cache or not variant.prefix_cache or scores):
                assert events[0].cached_tokens == 0
            expected = list(request.prompt_ids[1:]) if scores else []
            assert rank.scored.get(request.number, []) == expected


@settings(max_examples=120)
@given(workloads())
def test_slices_of_a_sequence_join_without_gap_or_overlap(workload):
    """Each slice starts where the last one ended, or at a block boundary after a (re)admission."""
    chosen, added = workload
    rank = SimulatedRank(chosen)
    for request in added:
        rank.add(request)
    rank.finish_all()
    computed: dict[int, int] = {}
    for batch in rank.batches:
        for piece in batch.slices:
            joins = piece.start == computed.get(piece.number)
            admitted = piece.start % chosen.block_size == 0
            assert joins or admitted
            assert len(piece.blocks) == 0  # live tables: every sequence has ended by now
            computed[piece.number] = piece.start + len(piece.token_ids)
    load = rank.scheduler.load()
    restarts = len([1 for b in rank.batches for s in b.slices if s.start == 0])
    if not chosen.prefix_cache and not any(request.group for request in added):
        most = len(added) + load.preemptions
        # With steps ahead, a preempted sequence may end by a token that was in flight.
        assert restarts == most or (chosen.ahead and len(added) <= restarts < most)


def test_a_prompt_half_run_does_not_wait_for_ever():
    """It was admitted where there was room for some of its tokens, and later ones go first since then."""
    limits = SchedulerLimits(
        max_running=5, max_step_tokens=5, block_size=3, kv_blocks=10, prefix_cache=False,
        max_context=1000, max_overtakes=3, ahead=1,
    )  # fmt: skip
    rank = SimulatedRank(limits)
    rank.add(make_request(0, [0] * 5, max_new=1, priority=-9))
    for number in range(1, 41, 2):
        for each in (number, number + 1):
            rank.add(make_request(each, [1] * 3, max_new=1, priority=9))
        rank.step()
    assert rank.events[0][-1].finish


@settings(max_examples=60)
@given(workloads(), st.data())
def test_nobody_waits_for_ever(workload, data):
    """A low priority ends although two of high priority arrive after every step."""
    chosen, _ = workload
    chosen = replace(chosen, max_overtakes=data.draw(st.integers(1, 3)))
    rank = SimulatedRank(chosen)
    victim = data.draw(requests(0, room_of(chosen)))
    rank.add(replace(victim, priority=-9))
    number = 0
    while not (rank.events[0] and rank.events[0][-1].finish):
        assert number < 2000
        for _ in range(2):
            number += 1
            rank.add(make_request(number, [1] * min(3, room_of(chosen)), max_new=1, priority=9))
        rank.step()
    assert rank.stream(0) == stream_alone(victim)
