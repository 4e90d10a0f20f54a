"""GPUs give banks back so that no row is overwritten and nobody waits for ever, in whatever order blocks run.

The broken variants are the proof that the checker can fail.
"""

from __future__ import annotations

import pytest

from tests.support.exchange.device_protocol_model import Model, Rules

PROGRAMS = {
    "pairs": "Db1 Cb1 Db2 Cb2 Db3 Cb3",
    "odd": "Db1 Cb1 Db2 Db3 Cb2 Db4 Db5",
    "apart": "Ds1 Ds2 Dr2 Dr1 Ds3 Dr3 Cs1 Cr1",
    "views": "Ds1 Dv1 Ds2 Dv2 Cf1 Cr1 R2 Ds3 Dv3 R3",
    "reverse_beside": "Ds1 Ds2 Dr2@2 Dr1@2 Ds3 Dr3@2",
    "release_beside": "Ds1 Dv1 Ds2 Dv2 R2@2 R1@2 Ds3 Dv3 R3",
}
LARGE = {  # several 100,000 states
    "receives_beside": "Ds1 Dr1@2 Ds2 Dr2@3 Ds3 Dr3@3",
    "published": "Ds1 Dr1@2 P Ds2 Dr2 P@2 Ds3 Dr3",
    "combine_beside": "Ds1 Dr1 Ds2 Cs1@2 Dr2 Cr1@2 Ds3 Dr3",
}
FIVE = "Ds1 Dr1@2 Ds2 Dr2@2 Ds3 Ds4 Dr4@2 Dr3@2 Ds5 Dr5"
LONG = "Db1 Cb1 Ds2 Ds3 Dr3@2 Dr2@2 Cs2 Cs3@2 Cr3 Cr2@2 Db4 P@2 Cb4 Ds5 Dv5@2 Cf5 Ds6 Dr6@2 Cr5 Db7 Cb6"


def holds(program: str, rules: Rules, ranks: int = 2) -> int:
    outcome = Model(program, ranks, rules).explore()
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.trace])
    return outcome.states


@pytest.mark.parametrize("rules", [Rules(), Rules(base=4), Rules(num_banks=4)], ids=["new", "reset", "banks"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_order_of_two_ranks(name: str, rules: Rules) -> None:
    assert holds(PROGRAMS[name], rules) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_every_order_of_two_ranks_and_their_streams(name: str) -> None:
    assert holds(LARGE[name], Rules()) > 100_000


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("program", [*PROGRAMS.values(), *LARGE.values(), FIVE, LONG])
def test_orders_drawn_at_random_with_one_rank_behind(program: str, ranks: int) -> None:
    model = Model(program, ranks, Rules())
    for seed in range(25):
        outcome = model.walk(seed)
        assert not outcome.violation, "\n".join([f"seed {seed}", outcome.violation, *outcome.trace])
        assert outcome.states > len(program.split()) * ranks


BROKEN = {
    "writes_at_once": (Rules(waits=False), PROGRAMS["apart"], "overwrites"),
    "tells_once": (Rules(watches=False), PROGRAMS["reverse_beside"], "deadlock"),
    "tells_once_of_views": (Rules(watches=False), PROGRAMS["release_beside"], "deadlock"),
    "first_block_counts": (Rules(whole=False), PROGRAMS["reverse_beside"], "overwrites"),
    "share_before_emptying": (Rules(empties_first=False), PROGRAMS["reverse_beside"], "overwrites"),
    "exact_cells": (Rules(at_least=False), PROGRAMS["pairs"], "deadlock"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_checker_finds_what_a_broken_protocol_does(name: str) -> None:
    rules, program, expected = BROKEN[name]
    outcome = Model(program, 2, rules).explore()
    assert expected in outcome.violation
    assert outcome.trace


def test_a_view_that_nobody_releases_ends_every_wait() -> None:
    assert "deadlock" in Model("Ds1 Dv1 Ds2 Dr2 Ds3 Dr3", 2, Rules()).explore().violation


def test_block_must_not_publish_a_stale_read() -> None:
    """Less than the first epoch of a bank is, without a sign, more than any."""
    model = Model(FIVE, 2, Rules(news=False))
    assert any("overwrites" in model.walk(seed).violation for seed in range(100))
