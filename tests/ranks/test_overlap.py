"""The overlap policy as a table of steps: when it measures, tries, switches, and keeps from switching."""

from __future__ import annotations

import pytest

from ep_server.ranks.overlap import OverlapPolicy, OverlapRule

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
        due = self.policy.stepped(ns, tokens)
        if due:
            self.policy.read(self.wait, self.compute)
        return due


def cycle(meter: Meter, waiting: float, trial_ns: int, trial_tokens: int = TOKENS) -> list[bool]:
    """Runs one cycle; returns the wish at every step. Outside the single window waits are of no interest."""
    wishes = []
    for step in range(RULE.window):
        wishes.append(meter.policy.wish(8))
        due = meter.step(SINGLE_NS, TOKENS, wait=int(waiting * 1000), compute=1000)
        assert due == (step == RULE.window - 1)
    for _ in range(RULE.window):
        wishes.append(meter.policy.wish(8))
        assert not meter.step(trial_ns, trial_tokens, wait=10**6, compute=1)
    for step in range(RULE.hold):
        wishes.append(meter.policy.wish(8))
        assert meter.step(123, 1, wait=10**6, compute=1) == (step == RULE.hold - 1)
    return wishes


def wishes(trial: bool, hold: bool) -> list[bool]:
    return [False] * RULE.window + [trial] * RULE.window + [hold] * RULE.hold


@pytest.mark.parametrize(("mode", "wish"), [("on", True), ("off", False)])
def test_a_fixed_mode_never_measures(mode: str, wish: bool) -> None:
    policy = OverlapPolicy(mode, RULE)
    for sequences in (0, 1, 2, 64):
        assert policy.wish(sequences) is wish
        assert not policy.stepped(SINGLE_NS, TOKENS)


def test_auto_tries_where_waiting_is_long_and_keeps_what_is_faster() -> None:
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


def test_one_sequence_is_not_cut_and_an_idle_rank_leaves_it_to_the_others() -> None:
    policy = OverlapPolicy("auto", RULE)
    meter = Meter(policy)
    for _ in range(RULE.window):
        meter.step(SINGLE_NS, TOKENS, wait=1000, compute=1000)
    assert [policy.wish(n) for n in (0, 1, 2)] == [True, False, True]
