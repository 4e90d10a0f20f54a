"""The overlap policy as a table of steps: when it tries two micro-batches, switches, and keeps its choice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_server.ranks.overlap import (
    FixedOverlap,
    MeasuredOverlap,
    Overlap,
    OverlapRule,
    Planned,
    Ran,
    bucket_of,
)

RULE = OverlapRule(window=4, first=6, hold=6, least=2, gain=0.9)
CYCLE = 2 * RULE.window + RULE.hold
TRIAL = [1, 1, 2, 2] * (RULE.window // 2)
Times = dict[int, int]  # ns of a step, by its micro-batches


def drive(policies: list[Overlap], took: list[Times], *, bucket: int = 64, ahead: int = 0) -> list[int]:
    """Micro-batches of each step, as the ranks agree on them; a step is counted `ahead` launches later."""
    ran: list[int] = []
    for step in range(len(took) + ahead):
        if step < len(took):
            ran.append(2 if all(policy.wants_two(Planned(8, bucket, bucket)) for policy in policies) else 1)
        if step >= ahead:
            count, times = ran[step - ahead], took[step - ahead]
            for policy in policies:
                policy.stepped(Ran(times[count], bucket, bucket, count))
    return ran


def measured(graphs: list[int] | None = None) -> MeasuredOverlap:
    return MeasuredOverlap(graphs, RULE)


@pytest.mark.parametrize("two", [True, False])
def test_a_fixed_mode_never_changes(two: bool) -> None:
    policy = FixedOverlap(two)
    for sequences in (0, 1, 2, 64):
        assert policy.wants_two(Planned(sequences, sequences)) is two
        policy.stepped(Ran(1000, sequences, micro_batches=1 + two))


@pytest.mark.parametrize(("sequences", "bucket", "agrees"), [(0, 0, True), (3, 0, False), (3, 64, True)])
def test_a_follower_refuses_only_steps_without_a_graph(sequences: int, bucket: int, agrees: bool) -> None:
    policy = measured([64])
    policy.lead(leads=False)
    assert policy.wants_two(Planned(sequences, sequences, bucket)) is agrees


@pytest.mark.parametrize("graphs", [None, [64]], ids=["any_size", "graphs"])
def test_the_rank_that_leads_then_decides(graphs: list[int] | None) -> None:
    """It measures anew: two micro-batches are slower now. The first rank to lead is absent, and returns."""
    first, second = measured(graphs), measured(graphs)
    second.lead(leads=False)
    assert drive([first, second], [{1: 1000, 2: 500}] * CYCLE)[-1] == 2
    second.lead(leads=True)
    ran = drive([second], [{1: 1000, 2: 1050}] * CYCLE)
    assert ran == TRIAL + [1] * RULE.hold
    first.lead(leads=False)
    first.lead(leads=True)
    second.lead(leads=False)
    assert drive([first, second], [{1: 1000, 2: 500}] * CYCLE)[2 * RULE.window :] == [2] * RULE.hold


@pytest.mark.parametrize(
    ("two", "held"), [(500, 2), (899, 2), (901, 1), (1000, 1), (1249, 1), (2000, 1)], ids=str
)
@pytest.mark.parametrize("graphs", [None, [64]], ids=["any_size", "graphs"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_bucket_runs_as_was_faster(two: int, held: int, graphs: list[int] | None, ahead: int) -> None:
    ran = drive([measured(graphs), FixedOverlap(two=True)], [{1: 1000, 2: two}] * 3 * CYCLE, ahead=ahead)
    for cycle in range(3):
        start = cycle * CYCLE + 2 * RULE.window
        assert ran[start + ahead : start + RULE.hold - ahead] == [held] * (RULE.hold - 2 * ahead)


def test_a_trial_takes_both_ways_in_turns() -> None:
    assert drive([measured()], [{1: 1000, 2: 1000}] * CYCLE) == TRIAL + [1] * RULE.hold


@pytest.mark.parametrize(("two", "rest"), [(2000, 1), (400, 2)])
def test_a_trial_without_hope_ends_early(two: int, rest: int) -> None:
    ran = drive([measured()], [{1: 1000, 2: two}] * CYCLE)
    assert ran == [1, 1, 2, 2] + [rest] * (CYCLE - 4)


def test_a_way_is_kept_until_the_other_is_clearly_faster() -> None:
    took = [{1: 1000, 2: two} for two in (800, 950, 1050, 1120, 950) for _ in range(CYCLE)]
    ran = drive([measured()], took)
    assert [ran[(cycle + 1) * CYCLE - 1] for cycle in range(5)] == [2, 2, 2, 1, 1]


@pytest.mark.parametrize(("disturbed", "true"), [(900, 1100), (1100, 900)], ids=["two", "one"])
def test_what_a_disturbed_trial_says_does_not_last(disturbed: int, true: int) -> None:
    rule = OverlapRule(window=4, first=6, hold=30, least=2, gain=0.99)
    trial = 2 * rule.window
    took = [{1: 1000, 2: disturbed}] * trial + [{1: 1000, 2: true}] * 200
    ran = drive([MeasuredOverlap(rule=rule)], took)
    at = 0
    for hold, held in (
        (6, 1 + (disturbed < 1000)),
        *((each, 1 + (true < 1000)) for each in (6, 12, 24, 30, 30)),
    ):
        assert ran[at : at + trial] == TRIAL
        at += trial + hold
        assert ran[at - hold : at] == [held] * hold


def test_steps_that_are_long_in_turns_mislead_no_trial() -> None:
    took = [{1: 1000 + late, 2: 950 + late} for late in (0, 100)] * CYCLE
    assert drive([MeasuredOverlap(rule=OverlapRule(window=4, first=6, hold=6))], took)[-1] == 2
    assert drive([MeasuredOverlap(rule=OverlapRule(window=4, first=6, hold=6))], took[1:])[-2] == 2


def test_a_trial_without_hope_is_believed_at_once() -> None:
    rule = OverlapRule(window=4, first=6, hold=30, least=2)
    ran = drive([MeasuredOverlap(rule=rule)], [{1: 1000, 2: 2000}] * 100)
    assert ran == ([1, 1, 2, 2] + [1] * (4 + rule.hold)) * 2 + [1, 1, 2, 2] + [1] * 20


def test_buckets_are_judged_apart() -> None:
    policy = measured([64, 128])
    assert drive([policy], [{1: 1000, 2: 500}] * CYCLE, bucket=128)[-1] == 2
    # The first step is still taken for one of the bucket before it; the runner has no such graph.
    assert drive([policy], [{1: 1000, 2: 1}] * CYCLE, bucket=32)[1:] == [1] * (CYCLE - 1)
    assert drive([policy], [{1: 1000, 2: 2000}] * (CYCLE - 1), bucket=64)[-1] == 1
    assert not policy.wants_two(Planned(8, 64, 64))
    assert not policy.wants_two(Planned(8, 8, 0))


def test_an_idle_rank_0_decides_for_the_others() -> None:
    policy = measured()
    drive([policy], [{1: 1000, 2: 500}] * (CYCLE - 1))
    assert policy.wants_two(Planned(0, 0))


def test_one_rank_that_refuses_keeps_all_at_one() -> None:
    assert drive([measured(), FixedOverlap(two=False)], [{1: 1000, 2: 1}] * 2 * CYCLE) == [1] * 2 * CYCLE


@given(tokens=st.integers(0, 1 << 20))
def test_a_bucket_is_the_next_power_of_two(tokens: int) -> None:
    bucket = bucket_of(tokens)
    assert bucket & (bucket - 1) == 0
    assert bucket // 2 < tokens <= bucket or bucket == tokens == 0


@given(
    one=st.integers(1000, 100_000),
    ratio=st.floats(0.2, 5.0),
    noise=st.floats(0.0, 0.1),
    tokens=st.integers(1, 4096),
    seed=st.integers(0, 99),
)
def test_auto_stays_within_three_percent_of_the_faster(
    one: int, ratio: float, noise: float, tokens: int, seed: int
) -> None:
    """Steps of noisy times, from 0 % to 10 % longer: the time of all against that of the faster way alone."""
    draw = random.Random(seed)
    policy, rule = MeasuredOverlap(), OverlapRule()
    two, spent, best = int(one * ratio), 0.0, 0.0
    for _ in range(2 * rule.window + rule.hold):
        count = 2 if policy.wants_two(Planned(tokens, tokens)) else 1
        slower = 1 + noise * draw.random()
        took = {1: one, 2: two}[count] * slower
        policy.stepped(Ran(int(took), tokens, micro_batches=count))
        spent += took
        best += min(one, two) * slower
    near = noise > 0.02 and abs(ratio - 1) < noise  # no measurement of so few steps tells them apart
    assert spent <= (1.03 + noise * near) * best
