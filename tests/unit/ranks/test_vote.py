"""The vote: its record, every small tally, and clusters whose messages arrive in any order."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ep_server.errors import InternalError
from ep_server.ranks import vote as vote_module
from ep_server.ranks.vote import RECORD_BYTES, Verdict, Vote, Voter, tally
from ep_server.scheduler import SchedulerLimits
from ep_server.scheduler.prompt_budget import RanStep
from tests.support.ranks.simulated_rank import SimulatedRank, make_request, stream_alone

votes = st.builds(
    Vote,
    step=st.integers(0, 2**64 - 1),
    generation=st.integers(0, 2**64 - 1),
    last_work=st.integers(0, 2**64 - 1),
    tokens=st.integers(0, 2**32 - 1),
    bucket=st.integers(0, 2**32 - 1),
    has_work=st.booleans(),
    micro_batch_ok=st.booleans(),
    graph_ok=st.booleans(),
    stop=st.booleans(),
    prepared=st.integers(0, 2**64 - 1),
    prompts=st.integers(0, 2**32 - 1),
    streams=st.integers(0, 2**32 - 1),
    normal_from=st.integers(0, 2**32 - 1),
)


# --- the record ---


@given(votes)
def test_a_record_is_64_bytes_and_comes_back(vote):
    assert len(vote.pack()) == RECORD_BYTES == 64
    assert Vote.unpack(vote.pack()) == vote


def test_the_bytes_are_fixed():
    vote = Vote(
        3,
        2,
        9,
        tokens=5,
        bucket=8,
        has_work=True,
        micro_batch_ok=False,
        stop=True,
        prepared=6,
        prompts=4,
        streams=2,
        normal_from=258,
    )
    expected = b"epV1" + bytes([13, 0, 0, 0, 3, *[0] * 7, 2, *[0] * 7, 9, *[0] * 7, 5, 0, 0, 0, 8, 0, 0, 0])
    assert vote.pack() == expected + bytes([6, *[0] * 7, 4, 0, 0, 0, 2, 0, 0, 0, 2, 1, *[0] * 6])


@pytest.mark.parametrize(
    "record", [b"", bytes(64), b"epV1" + bytes(59), b"epV1" + bytes(61), b"epV2" + bytes(60)]
)
def test_other_bytes_are_refused(record):
    with pytest.raises(InternalError, match=f"not a vote: {len(record)} bytes"):
        Vote.unpack(record)


@pytest.mark.parametrize(
    "field_name",
    ["step", "generation", "last_work", "tokens", "bucket", "prepared", "prompts", "streams", "normal_from"],
)
@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_number_that_does_not_fit_is_refused(field_name, value):
    with pytest.raises(InternalError, match="does not fit its record"):
        replace(Vote(0, 0, 0), **{field_name: value}).pack()


# --- the tally, exhaustively ---

FLAGS = [
    dict(zip(("has_work", "micro_batch_ok", "graph_ok", "stop"), bits, strict=True))
    for bits in itertools.product((False, True), repeat=4)
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_combination_of_flags_and_last_work(ranks):
    """48 votes per rank (16 flag sets, 3 work numbers); for 3 ranks the work numbers take 2 values."""
    numbers = (4, 5, 6) if ranks < 3 else (4, 5)
    options = [(flags, number) for flags in FLAGS for number in numbers]
    for combination in itertools.product(options, repeat=ranks):
        cast = [
            Vote(7, 1, number, tokens=rank, bucket=2 * rank, prompts=rank // 2, streams=5, **flags)
            for rank, (flags, number) in enumerate(combination)
        ]
        told = [flags["stop"] for flags, _ in combination]
        work = any(flags["has_work"] for flags, _ in combination)
        same = len({number for _, number in combination}) == 1
        assert tally(cast) == Verdict(
            step=7,
            run=work and not all(told),
            park=not work and same and not any(told),
            stop=all(told),
            micro_batches=2 if all(flags["micro_batch_ok"] for flags, _ in combination) else 1,
            graph=all(flags["graph_ok"] for flags, _ in combination),
            bucket=2 * (ranks - 1),
            tokens=tuple(range(ranks)),
            singles=ranks // 2,
            prompts=(ranks - 1) // 2,
            streams=5 * ranks,
        )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_switch_to_what_all_have_prepared(ranks):
    for prepared in itertools.product((0, 4, 5), repeat=ranks):
        for stops in itertools.product((False, True), repeat=ranks):
            cast = [Vote(7, 1, 2, stop=s, prepared=p) for p, s in zip(prepared, stops, strict=True)]
            same = len(set(prepared)) == 1 and not all(stops)
            assert tally(cast).change == (prepared[0] if same else 0)


@given(st.lists(votes, min_size=1, max_size=5))
def test_a_verdict_names_at_most_one_action(cast):
    cast = [replace(vote, step=1, generation=1) for vote in cast]
    verdict = tally(cast)
    assert verdict.run + verdict.park + verdict.stop <= 1
    assert verdict == tally(cast)


@pytest.mark.parametrize("change", [{"step": 8}, {"generation": 2}])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_out_of_step_or_generation_are_named(change, odd):
    cast = [Vote(7, 1, 0)] * 3
    cast[odd] = replace(cast[odd], **change)
    with pytest.raises(InternalError, match=f"rank {odd or 1} votes on step"):
        tally(cast)


def test_no_votes_are_an_error():
    with pytest.raises(InternalError):
        tally([])


# --- one rank's end ---


def test_a_voter_knows_the_streams_of_the_other_ranks():
    voters = [Voter() for _ in range(3)]
    given = zip(voters, (0, 3, 4), (0, 0, 100), strict=True)
    records = [v.cast(tokens=n + p, has_work=True, prompts=p, streams=n) for v, n, p in given]
    verdicts = [voter.decide(records) for voter in voters]
    assert [voter.elsewhere for voter in voters] == [7, 4, 3]
    assert verdicts[0].ran(9, 0) == RanStep(ns=9, rows=104, singles=4, prompts=100)
    assert verdicts[0].ran(9, 128).rows == 128


def test_a_voter_counts_steps_and_keeps_the_last_number():
    voter = Voter(generation=3)
    voter.saw(2)
    voter.saw(5)
    with pytest.raises(InternalError, match="work number 5 after 5"):
        voter.saw(5)
    record = voter.cast(tokens=4, has_work=True, bucket=8, micro_batch_ok=False, graph_ok=False)
    assert Vote.unpack(record) == Vote(0, 3, 5, 4, 8, has_work=True, micro_batch_ok=False, graph_ok=False)
    assert voter.decide([record]).run
    assert repr(voter) == "Voter(step=1, last_work=5, generation=3)"
    with pytest.raises(InternalError, match="vote is on step 0, this rank is at 1"):
        voter.decide([record])


# --- every interleaving of a small cluster ---


@dataclass
class Node:
    """A rank's loop: read messages, vote, obey. `work` is what is left to do, in steps."""

    voter: Voter = field(default_factory=Voter)
    transit: deque = field(default_factory=deque)
    work: int = 0
    told: bool = False
    record: bytes | None = None
    parked: bool = False
    stopped: bool = False
    offered: int = 0  # a change
    changes: tuple[int, ...] = ()  # switched to

    def key(self):
        flags = self.told, self.record is not None, self.parked, self.stopped
        return (*self.transit, self.work, *flags, self.offered, self.changes)

    def read_and_vote(self, count: int) -> None:
        for _ in range(count):
            kind, number, work = self.transit.popleft()
            self.parked = False
            if kind == "stop":
                self.told = True
                continue
            self.voter.saw(number)
            if kind == "switch":
                assert not self.offered  # the front waits for the last change
                self.offered = work
            else:
                self.work += work
        self.record = self.voter.cast(
            tokens=min(self.work, 1), has_work=self.work > 0, stop=self.told, prepared=self.offered
        )

    def obey(self, verdict: Verdict) -> None:
        """Switches before the step runs."""
        if verdict.change:
            assert verdict.change == self.offered
            self.changes, self.offered = (*self.changes, verdict.change), 0


@dataclass
class Cluster:
    """Ranks and the script of the front: (rank, steps of work) per request, "stop", or a change to switch to.

    All ranks have prepared a change when the front sends it, and switched before it sends the next one.
    """

    nodes: list[Node]
    script: tuple

    def key(self):
        return (self.script, *(node.key() for node in self.nodes))

    def moves(self):
        """Every next cluster: the front sends, a rank reads some messages and votes, all settle."""
        changing = any(node.offered or ("switch" in str(node.transit)) for node in self.nodes)
        if self.script and not (isinstance(self.script[0], int) and changing):
            yield self.sent()
        for index, node in enumerate(self.nodes):
            if node.record is None and not node.stopped:
                for count in range(1 if node.parked else 0, len(node.transit) + 1):
                    following = copy.deepcopy(self)
                    following.nodes[index].read_and_vote(count)
                    yield following
        if all(node.record is not None for node in self.nodes):
            yield self.settled()

    def sent(self):
        following = copy.deepcopy(self)
        action, following.script = self.script[0], self.script[1:]
        number = 100 - len(following.script)
        for rank, node in enumerate(following.nodes):
            if action == "stop":
                node.transit.append(("stop", 0, 0))
            elif isinstance(action, int):
                node.transit.append(("switch", number, action))
            else:
                target, work = action
                node.transit.append(("work", number, work if rank == target else 0))
        return following

    def settled(self):
        following = copy.deepcopy(self)
        records = [node.record for node in following.nodes]
        verdicts = [node.voter.decide(records) for node in following.nodes]
        assert len(set(verdicts)) == 1
        for node in following.nodes:
            node.record = None
            node.obey(verdicts[0])
            node.work -= bool(verdicts[0].run and node.work)
            node.parked, node.stopped = verdicts[0].park, verdicts[0].stop
        return following

    @property
    def at_rest(self) -> bool:
        """Everything sent, read and done, and all parked or all stopped."""
        if self.script or any(node.transit for node in self.nodes):
            return False
        assert len({node.changes for node in self.nodes}) == 1
        if any(node.told for node in self.nodes):
            return all(node.stopped for node in self.nodes)
        return all(node.parked and not node.work and not node.offered for node in self.nodes)


def stuck_states(ranks: int, script: tuple) -> tuple[int, list[Cluster]]:
    """Walks every reachable state; (how many there are, those from which rest cannot be reached)."""
    start = Cluster([Node() for _ in range(ranks)], script)
    found = {start.key(): start}
    before: dict = {start.key(): set()}
    queue = deque([start])
    while queue:
        cluster = queue.popleft()
        for following in cluster.moves():
            key = following.key()
            if key not in found:
                found[key], before[key] = following, set()
                queue.append(following)
            before[key].add(cluster.key())
    good = {key for key, cluster in found.items() if cluster.at_rest}
    pending = deque(good)
    while pending:
        for earlier in before[pending.popleft()] - good:
            good.add(earlier)
            pending.append(earlier)
    return len(found), [cluster for key, cluster in found.items() if key not in good]


SCRIPTS = [
    (1, ((0, 2), (0, 1), "stop")),
    (2, ((0, 1), (1, 1))),
    (2, ((0, 2), (1, 1), (1, 1))),
    (2, ((1, 2), "stop")),
    (2, ((0, 1), (1, 1), "stop")),
    (3, ((2, 1), (0, 1))),
    (3, ((1, 1), "stop")),
    (1, (7, (0, 1), 8)),
    (2, ((0, 1), 7, (1, 1))),
    (2, (7, 8, (1, 1))),
    (2, (7, (1, 1), "stop")),
    (3, (7,)),
    (3, ((1, 1), 7)),
]


@pytest.mark.parametrize(("ranks", "script"), SCRIPTS)
def test_from_every_reachable_state_the_cluster_comes_to_rest(ranks, script):
    count, stuck = stuck_states(ranks, script)
    assert count > 10
    assert stuck == []


def parks_without_agreement(cast):
    verdict = tally(cast)
    return replace(verdict, park=not verdict.run and not verdict.stop)


def parks_although_told_to_stop(cast):
    verdict = tally(cast)
    agreed = len({vote.last_work for vote in cast}) == 1
    return replace(verdict, park=agreed and not verdict.run and not verdict.stop)


def never_parks(cast):
    return replace(tally(cast), park=False)


@pytest.mark.parametrize(
    "rule_under_test", [parks_without_agreement, parks_although_told_to_stop, never_parks]
)
def test_the_walk_finds_what_a_weaker_rule_breaks(rule_under_test, monkeypatch):
    monkeypatch.setattr(vote_module, "tally", rule_under_test)
    broken = False
    for ranks, script in SCRIPTS:
        try:
            broken |= bool(stuck_states(ranks, script)[1])
        except InternalError:  # a rank voted on another step than its peers
            broken = True
    assert broken


# --- a random cluster with real schedulers ---


class ClusterMachine(RuleBasedStateMachine):
    """Ranks with schedulers; messages delayed at will; requests and cancels at any time; then a stop."""

    @initialize(ranks=st.integers(1, 4))
    def start(self, ranks):
        limits = SchedulerLimits(4, 6, 4, 8, True, 32)
        self.ranks = [SimulatedRank(limits) for _ in range(ranks)]
        self.nodes = [Node() for _ in range(ranks)]
        self.batches = [None] * ranks
        self.sent: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.number = 0

    @rule(rank=st.integers(0, 3), prompt=st.integers(1, 12), max_new=st.integers(1, 6))
    def submit(self, rank, prompt, max_new):
        rank %= len(self.nodes)
        self.number += 1
        self.sent[self.number] = rank
        request = make_request(self.number, [self.number % 5] * prompt, max_new)
        for other, node in enumerate(self.nodes):
            node.transit.append(("work", self.number, request if other == rank else None))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def cancel(self, data):
        number = data.draw(st.sampled_from(sorted(self.sent)))
        self.cancelled.add(number)
        self.nodes[self.sent[number]].transit.append(("cancel", number, None))

    @rule(rank=st.integers(0, 3), count=st.integers(0, 5))
    def advance(self, rank, count):
        self.advance_rank(rank % len(self.nodes), count)

    @rule(times=st.integers(1, 6))
    def advance_all(self, times):
        for _ in range(times):
            for rank in range(len(self.nodes)):
                self.advance_rank(rank, 2)

    def advance_rank(self, rank: int, count: int) -> None:
        """One rank reads up to `count` messages, plans and votes; the last to vote lets all obey."""
        node, scheduler = self.nodes[rank], self.ranks[rank].scheduler
        if node.record is None and not node.stopped:
            for _ in range(min(count, len(node.transit))):
                self.read(rank, *node.transit.popleft())
            if not node.parked:
                self.batches[rank] = batch = scheduler.plan()
                node.record = node.voter.cast(
                    tokens=batch.num_tokens, has_work=scheduler.has_work, stop=node.told
                )
        if all(other.record is not None for other in self.nodes):
            self.obey()

    def read(self, rank, kind, number, request):
        node, simulated = self.nodes[rank], self.ranks[rank]
        if kind == "cancel":  # wakes nobody: the others would not hear of it
            simulated.scheduler.cancel(number)
            return
        node.parked = False
        if kind == "stop":
            node.told = True
        else:
            node.voter.saw(number)
            if request is not None:
                simulated.add(request)

    def obey(self):
        records = [node.record for node in self.nodes]
        verdicts = {node.voter.decide(records) for node in self.nodes}
        (verdict,) = verdicts
        for node, simulated, batch in zip(self.nodes, self.ranks, self.batches, strict=True):
            node.record = None
            node.parked, node.stopped = verdict.park, verdict.stop
            if verdict.run:
                simulated.finish(batch, simulated.run(batch))
            elif not verdict.stop:
                assert not batch.slices, "a rank with a batch was told not to run"
                simulated.freed += simulated.scheduler.freed()

    @invariant()
    def parked_ranks_are_idle_and_level(self):
        if not hasattr(self, "nodes"):
            return
        for node, simulated in zip(self.nodes, self.ranks, strict=True):
            assert not (node.parked and simulated.scheduler.has_work)
        steps = {node.voter.step for node in self.nodes}
        assert len(steps) == 1

    def teardown(self):
        if not hasattr(self, "nodes"):
            return
        for _ in range(2000):
            if all(node.parked and not node.transit for node in self.nodes):
                break
            for rank in range(len(self.nodes)):
                self.advance_rank(rank, 3)
        else:
            raise AssertionError("the cluster does not come to rest")
        for number, rank in self.sent.items():
            simulated = self.ranks[rank]
            alone = stream_alone(simulated.requests[number])
            seen = simulated.stream(number)
            assert seen == alone or (number in self.cancelled and seen == alone[: len(seen)])
        for node in self.nodes:
            node.transit.append(("stop", 0, None))
        for rank in [*range(len(self.nodes))] * 3:
            self.advance_rank(rank, 1)
        assert all(node.stopped for node in self.nodes)


ClusterMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestClusterMachine = ClusterMachine.TestCase
