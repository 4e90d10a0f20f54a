"""The protocol holds in every interleaving where ranks of a host read what one of them takes in."""

from __future__ import annotations

import pytest

from tests.support.exchange.gateway_model import GatewayModel, GatewayRules
from tests.support.exchange.protocol_model import Fault, Outcome, Status
from tests.support.exchange.protocol_programs import PROGRAMS, SHORT, check_ends, holds

SLOW = pytest.mark.slow
HOSTS = ((0, 1, 1), pytest.param((0, 0, 1), marks=SLOW), pytest.param((0, 1, 2), marks=SLOW))


def explore(program: str, rules: GatewayRules, fault: Fault | None = None) -> Outcome:
    return GatewayModel([program.split()] * len(rules.hosts), rules, fault).explore()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("hosts", HOSTS)
def test_every_interleaving_without_a_fault_finishes(name: str, hosts: tuple[int, ...]) -> None:
    outcome = explore(PROGRAMS[name], GatewayRules(hosts=hosts, fused=True))
    holds(outcome)
    assert outcome.ends == {(Status.DONE,) * 3}
    assert outcome.states > 1000


@pytest.mark.parametrize("name", ["in_flight", "pair"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("kind", ["dies", "stalls"])
def test_a_fault_ends_in_an_error_on_every_rank(name: str, kind: str, victim: int) -> None:
    outcome = explore(SHORT[name], GatewayRules(fused=True), Fault(kind, victim))
    holds(outcome)
    check_ends(outcome, kind, mask=False)


BROKEN = {
    "gateway_alone_consumes": (GatewayRules(all_consume=False), "two_in_flight", "overwrites"),
    "no_wait_for_consumed": (GatewayRules(acknowledge="none"), "two_in_flight", "overwrites"),
    "record_before_row": (GatewayRules(data_first=False), "pairs", "finds epoch"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_checker_finds_what_a_broken_protocol_does(name: str) -> None:
    rules, program, expected = BROKEN[name]
    outcome = explore(PROGRAMS[program], rules)
    assert expected in outcome.violation
    assert outcome.trace
