"""The cell protocol holds in every interleaving, also with a stalled, a masked and a dying rank.

The broken variants at the end are the proof that the checker can fail.
"""

from __future__ import annotations

import pytest

from tests.support.exchange.protocol_model import Fault, Model, Outcome, Rules, Status
from tests.support.exchange.protocol_programs import PROGRAMS, SHORT, check_ends, holds

RULES = Rules()
LARGE = {"dispatches", "pair_and_half"}  # millions of states with a stalled rank and masks
COMBINES = "Cs1 Cr1 Cs2 Cr2 Cs3 Cr3"
WHOLE = "Ds1 Dr1 Ds2 Dr2 Ds3 Dr3"
FORGETFUL = "Ds1 Ds2 Dr2 Ds3 Dr3"  # dispatch 1 is never received


def explore(program: str, ranks: int, rules: Rules = RULES, fault: Fault | None = None) -> Outcome:
    return Model([program.split()] * ranks, rules, fault).explore()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_interleaving_without_a_fault_finishes(name: str, ranks: int) -> None:
    outcome = explore(PROGRAMS[name], ranks)
    holds(outcome)
    assert outcome.ends == {(Status.DONE,) * ranks}
    assert outcome.states > 100


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kind", ["dies", "stalls"])
def test_a_fault_of_one_of_two_ranks_ends_in_an_error_or_a_mask(name: str, kind: str, mask: bool) -> None:
    outcome = explore(PROGRAMS[name], 2, fault=Fault(kind, 1, mask))
    holds(outcome)
    check_ends(outcome, kind, mask)


@pytest.mark.parametrize(
    ("kind", "mask", "name"),
    [
        (kind, mask, name)
        for kind in ("dies", "stalls")
        for mask in (False, True)
        for name in SHORT
        if not (kind == "stalls" and mask and name in LARGE)
    ],
)
def test_fault_of_one_of_three_ranks_ends_in_error_or_mask(name: str, kind: str, mask: bool) -> None:
    outcome = explore(SHORT[name], 3, Rules(fused=True), Fault(kind, 2, mask))
    holds(outcome)
    check_ends(outcome, kind, mask)


def test_late_rows_of_a_masked_rank_stay_in_its_own_slots() -> None:
    """Stalled in a send, masked meanwhile, it writes on when the bank is in use again."""
    stalled = Fault("stalls", 2, mask=True)
    holds(explore(COMBINES, 3, Rules(fused=True), stalled))
    outcome = explore(COMBINES, 3, Rules(fused=True, own_slots=False), stalled)
    assert "finds epoch" in outcome.violation or "overwrites" in outcome.violation


@pytest.mark.parametrize("mask", [False, True])
def test_ranks_that_mask_a_peer_finish_without_it(mask: bool) -> None:
    outcome = explore(SHORT["pair_and_half"], 3, fault=Fault("masked", 2, mask))
    holds(outcome)
    ends = {statuses[:2] for statuses in outcome.ends}
    assert (Status.DONE, Status.DONE) in ends
    if mask:
        assert ends == {(Status.DONE, Status.DONE)}


@pytest.mark.parametrize("op", ["D", "C"])
def test_a_hook_that_nobody_calls_is_reported(op: str) -> None:
    received = " ".join(f"Ds{e} Dr{e} Cs{e}" for e in (1, 2, 3)) if op == "C" else "Ds1 Ds2 Ds3"
    outcome = explore(received, 2)
    holds(outcome)
    assert outcome.ends == {(Status.HOOK_NOT_CALLED,) * 2}


def test_a_hook_that_one_rank_forgets_ends_its_peer_too() -> None:
    outcome = Model([WHOLE.split(), FORGETFUL.split()], Rules(), Fault("stalls", 1)).explore()
    holds(outcome)
    for first, second in outcome.ends:
        assert first in (Status.TIMEOUT, Status.ABORTED)
        assert second in (Status.TIMEOUT, Status.ABORTED, Status.HOOK_NOT_CALLED)
    assert (Status.TIMEOUT, Status.HOOK_NOT_CALLED) in outcome.ends


def test_forgotten_hook_without_deadlines_is_a_deadlock() -> None:
    assert "deadlock" in Model([WHOLE.split(), FORGETFUL.split()], Rules()).explore().violation


def test_four_banks_carry_four_operations_in_flight() -> None:
    holds(explore("Ds1 Ds2 Ds3 Ds4 Dr1 Dr2 Dr3 Dr4 Ds5 Dr5", 2, Rules(num_banks=4)))


BROKEN = {
    "no_wait_for_consumed": (Rules(acknowledge="none"), "two_in_flight", "overwrites"),
    "combine_as_acknowledgement": (Rules(acknowledge="combine"), "two_in_flight", "overwrites"),
    "combine_as_acknowledgement_none_due": (Rules(acknowledge="combine"), "odd_in_flight", "overwrites"),
    "last_read_instead_of_prefix": (Rules(prefix=False), "reverse", "overwrites"),
    "header_before_row": (Rules(data_first=False), "pairs", "finds epoch"),
    "any_epoch_accepted": (Rules(exact=False), "pairs", "finds epoch"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_checker_finds_what_a_broken_protocol_does(name: str, ranks: int) -> None:
    rules, program, expected = BROKEN[name]
    outcome = explore(PROGRAMS[program], ranks, rules)
    assert expected in outcome.violation
    assert outcome.trace
