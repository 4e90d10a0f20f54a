"""The overlap policy as a table of steps: when it measures, tries, switches, and keeps from switching."""

from __future__ import annotations

import pytest

from ep_server.ranks.overlap import BucketOverlap, BucketRule, OverlapPolicy, OverlapRule, Ran

RULE = OverlapRule(waiting=0.5, gain=0.9, keep=1.0, similar=0.25, window=4, hold=6)
SINGLE_NS, TOKENS = 1000, 8


class Meter:
    """Cumulative readings, as a rank has them."""

    def __init__(self, policy: OverlapPolicy) -> None:
        self.policy, self.wait, self.compute = policy, 77, 5
        policy.read(self.wait, self.compute)

    def step(self, ns: int, tokens: int, wait: int, compute: int) -> bool:
        self.wait += wait
        self.compute += compute
        due = self.policy.stepped(Ran(ns, tokens))
        if due:
            self.policy.read(self.wait, self.compute)
        return due


def cycle(meter: Meter, waiting: float, trial_ns: int, trial_tokens: int = TOKENS) -> list[bool]:
    """Runs one cycle; returns the wish at every step. Outside the single window waits are of no interest."""
    wishes = []
    for step in range(RULE.window):
        wishes.append(meter.policy.wants_two(8, 0))
        due = meter.step(SINGLE_NS, TOKENS, wait=int(waiting * 1000), compute=1000)
        assert due == (step == RULE.window - 1)
    for _ in range(RULE.window):
        wishes.append(meter.policy.wants_two(8, 0))
        assert not meter.step(trial_ns, trial_tokens, wait=10**6, compute=1)
    for step in range(RULE.hold):
        wishes.append(meter.policy.wants_two(8, 0))
        assert meter.step(123, 1, wait=10**6, compute=1) == (step == RULE.hold - 1)
    return wishes


def wishes(trial: bool, hold: bool) -> list[bool]:
    return [False] * RULE.window + [trial] * RULE.window + [hold] * RULE.hold


@pytest.mark.parametrize(("mode", "wish"), [("on", True), ("off", False)])
def test_a_fixed_mode_never_measures(mode: str, wish: bool) -> None:
    policy = OverlapPolicy(mode, RULE)
    for sequences in (0, 1, 2, 64):
        assert policy.wants_two(sequences, 0) is wish
        assert not policy.stepped(Ran(SINGLE_NS, TOKENS))


def test_auto_tries_overlap_on_long_waits_and_keeps_the_faster() -> None:
    meter = Meter(OverlapPolicy("auto", RULE))
    assert cycle(meter, waiting=0.5, trial_ns=1) == wishes(trial=False, hold=False)
    assert cycle(meter, waiting=0.51, trial_ns=950) == wishes(trial=True, hold=False)
    assert cycle(meter, waiting=0.51, trial_ns=899) == wishes(trial=True, hold=True)
    assert cycle(meter, waiting=0.51, trial_ns=999) == wishes(trial=True, hold=True)
    assert cycle(meter, waiting=0.51, trial_ns=1000) == wishes(trial=True, hold=False)
    assert cycle(meter, waiting=0.51, trial_ns=899) == wishes(trial=True, hold=True)
    assert cycle(meter, waiting=0.1, trial_ns=1) == wishes(trial=False, hold=False)


@pytest.mark.parametrize(("tokens", "hold"), [(6, True), (5, False), (10, True), (11, False), (0, False)])
def test_steps_of_different_size_do_not_compare(tokens: int, hold: bool) -> None:
    meter = Meter(OverlapPolicy("auto", RULE))
    assert cycle(meter, waiting=1.0, trial_ns=1, trial_tokens=tokens) == wishes(trial=True, hold=hold)


def test_one_sequence_is_not_split_and_idle_ranks_abstain() -> None:
    policy = OverlapPolicy("auto", RULE)
    meter = Meter(policy)
    for _ in range(RULE.window):
        meter.step(SINGLE_NS, TOKENS, wait=1000, compute=1000)
    assert [policy.wants_two(n, 0) for n in (0, 1, 2)] == [True, False, True]


BUCKETS = BucketRule(window=4, hold=6, gain=0.9)
CYCLE = 2 * BUCKETS.window + BUCKETS.hold


def drive(
    policies: list[BucketOverlap], steps: int, took: dict[int, list[int]], bucket: int = 64, ahead: int = 1
) -> list[int]:
    """Micro-batches of each step, as the ranks agree on them; a step is counted `ahead` launches later.

    took: ns of a step by micro-batches, for each rank.
    """
    ran: list[int] = []
    for step in range(steps + ahead):
        if step < steps:
            ran.append(2 if all(policy.wants_two(8, bucket) for policy in policies) else 1)
        if step >= ahead:
            count = ran[step - ahead]
            for rank, policy in enumerate(policies):
                assert not policy.stepped(Ran(took[count][rank], 8, bucket, count))
    return ran


@pytest.mark.parametrize(
    ("took", "held"),
    [
        ({1: [1000, 1000], 2: [899, 899]}, 2),
        ({1: [1000, 1000], 2: [901, 901]}, 1),
        ({1: [1000, 1000], 2: [1249, 1249]}, 1),
        ({1: [1000, 1000], 2: [899, 901]}, 1),  # a tie for one of them
    ],
)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_bucket_is_run_as_was_faster_in_its_trial(
    took: dict[int, list[int]], held: int, ahead: int
) -> None:
    policies = [BucketOverlap([64], BUCKETS) for _ in range(2)]
    ran = drive(policies, 3 * CYCLE, took, ahead=ahead)
    for cycle in range(3):
        at = cycle * CYCLE + ahead
        assert ran[at + BUCKETS.window : at + 2 * BUCKETS.window] == [2] * BUCKETS.window
        assert ran[at + 2 * BUCKETS.window : at + CYCLE - ahead] == [held] * (BUCKETS.hold - ahead)


@pytest.mark.parametrize("took", [{1: [1000, 1000], 2: [1300, 1300]}, {1: [1000, 1000], 2: [900, 1300]}])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_trial_without_hope_ends_early_and_all_go_on_counting(
    took: dict[int, list[int]], ahead: int
) -> None:
    policies = [BucketOverlap([64], BUCKETS) for _ in range(2)]
    ran = drive(policies, 3 * CYCLE, took, ahead=ahead)
    tried = 2 + ahead  # launched before the second was counted
    for cycle in range(3):
        first = cycle * CYCLE + ahead + BUCKETS.window
        assert ran[first : first + tried] == [2] * tried
        assert ran[first + tried : first + BUCKETS.window + BUCKETS.hold - ahead] == [1] * (
            BUCKETS.window + BUCKETS.hold - ahead - tried
        )


def test_what_becomes_faster_is_found_at_the_next_trial() -> None:
    policies = [BucketOverlap([64], BUCKETS)]
    assert drive(policies, CYCLE, {1: [1000], 2: [2000]}, ahead=0)[-1] == 1
    assert drive(policies, CYCLE, {1: [1000], 2: [500]}, ahead=0)[-1] == 2
    assert drive(policies, CYCLE, {1: [1000], 2: [2000]}, ahead=0)[-1] == 1


def test_buckets_are_judged_apart_and_others_never_cut() -> None:
    policies = [BucketOverlap([64, 128], BUCKETS)]
    assert drive(policies, CYCLE - 1, {1: [1000], 2: [500]}, bucket=128, ahead=0)[-1] == 2
    # The first one is wished for as the bucket before it; the runner has no such graph.
    assert drive(policies, CYCLE, {1: [1000], 2: [1]}, bucket=32, ahead=0)[1:] == [1] * (CYCLE - 1)
    assert drive(policies, CYCLE, {1: [1000], 2: [2000]}, bucket=64, ahead=0)[-1] == 1
    wanted = [policies[0].wants_two(n, bucket) for n, bucket in ((8, 128), (8, 64), (8, 0))]
    assert wanted == [True, False, False]


def test_an_idle_rank_votes_as_the_last_bucket_says() -> None:
    policy = BucketOverlap([64], BUCKETS)
    assert not policy.wants_two(0, 0)
    drive([policy], CYCLE - 1, {1: [1000], 2: [500]}, ahead=0)
    assert policy.wants_two(0, 0) and not policy.wants_two(3, 0)


def test_one_rank_that_refuses_keeps_all_at_one() -> None:
    policies = [BucketOverlap([64], BUCKETS), BucketOverlap([], BUCKETS)]
    assert drive(policies, 2 * CYCLE, {1: [1000, 1000], 2: [1, 1]}) == [1] * 2 * CYCLE
