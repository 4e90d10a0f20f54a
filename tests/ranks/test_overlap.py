"""The overlap policy as a table of steps: when it measures, switches, and keeps from switching."""

from __future__ import annotations

import pytest

from ep_server.ranks.overlap import OverlapPolicy, OverlapRule

RULE = OverlapRule(enter=0.5, leave=0.3, window=4, hold=6)


def window(policy: OverlapPolicy, share: float) -> None:
    """Runs the steps of one window and the hold that follows it."""
    for step in range(RULE.window):
        assert policy.measuring
        assert not policy.wish(8)
        assert policy.stepped() == (step == RULE.window - 1)
    policy.decide(int(share * 1000), 1000)


def hold(policy: OverlapPolicy) -> set[bool]:
    wishes = set()
    for _ in range(RULE.hold):
        assert not policy.measuring
        wishes.add(policy.wish(8))
        assert not policy.stepped()
    return wishes


@pytest.mark.parametrize(("mode", "wish"), [("on", True), ("off", False)])
def test_a_fixed_mode_never_measures(mode: str, wish: bool) -> None:
    policy = OverlapPolicy(mode, RULE)
    for sequences in (0, 1, 2, 64):
        assert policy.wish(sequences) is wish
        assert not policy.stepped()
    assert not policy.measuring


def test_auto_switches_with_hysteresis() -> None:
    policy = OverlapPolicy("auto", RULE)
    for share, wanted in [(0.4, False), (0.5, False), (0.51, True), (0.4, True), (0.3, False), (0.4, False)]:
        window(policy, share)
        assert hold(policy) == {wanted}


def test_fewer_than_two_sequences_are_not_cut() -> None:
    policy = OverlapPolicy("auto", RULE)
    window(policy, 2.0)
    assert [policy.wish(n) for n in (0, 1, 2)] == [False, False, True]


def test_a_window_without_computation_decides_for_one() -> None:
    policy = OverlapPolicy("auto", RULE)
    policy.decide(1000, 0)
    assert not policy.wanted
