"""Programs of the protocol model, and what must hold in each of its states."""

from __future__ import annotations

from tests.support.exchange.protocol_model import Outcome, Status

PROGRAMS = {
    "pairs": "Ds1 Dr1 Cs1 Cr1 Ds2 Dr2 Cs2 Cr2 Ds3 Dr3 Cs3 Cr3",
    "odd_dispatches": "Ds1 Dr1 Ds2 Dr2 Ds3 Dr3 Cs1 Cr1 Ds4 Dr4 Ds5 Dr5",
    "two_in_flight": "Ds1 Ds2 Dr1 Dr2 Ds3 Cs1 Dr3 Cs2 Cr1 Cr2 Ds4 Dr4",
    "reverse": "Ds1 Ds2 Dr2 Dr1 Ds3 Ds4 Dr4 Dr3 Ds5 Dr5",
    "views": "Ds1 Dv1 Ds2 Dv2 Cs1 Cs2 Cr1 Cr2 Ds3 Dv3 Cs3 Cr3",
    "odd_in_flight": "Ds1 Ds2 Dr1 Dr2 Ds3 Ds4 Dr3 Dr4 Ds5 Dr5",
    "late_combine_hook": "Ds1 Dr1 Cs1 Ds2 Dr2 Cs2 Cr1 Ds3 Dr3 Cr2 Cs3 Cr3",
}


SHORT = {
    "dispatches": "Ds1 Dr1 Ds2 Dr2 Ds3 Dr3",
    "pair_and_half": "Ds1 Dr1 Cs1 Ds2 Cr1 Dr2 Ds3 Dr3",
    "in_flight": "Ds1 Ds2 Dr1 Dr2 Ds3",
    "pair": "Ds1 Dr1 Cs1 Cr1",
}


def holds(outcome: Outcome) -> None:
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.trace])


def check_ends(outcome: Outcome, kind: str, mask: bool) -> None:
    """Which final states a fault may lead to, and that the interesting ones are reached."""
    seen = set().union(*outcome.ends)
    if mask:
        assert seen <= {Status.DONE, Status.DEAD}, "with masks every living rank finishes"
    else:
        assert {Status.DONE, Status.TIMEOUT} <= seen
        for statuses in outcome.ends:
            assert Status.ABORTED not in statuses or Status.TIMEOUT in statuses, "an abort has an origin"
    assert (Status.DEAD in seen) == (kind == "dies")
