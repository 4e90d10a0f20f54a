"""Generations are safe in every interleaving: ranks lost in every state, twice, during a move and a join.

The last rank too, and the processes that start in the places of all.

The broken variants at the end are the proof that the checker can fail.
"""

from __future__ import annotations

import pytest

from tests.support.ranks.generations_model import Bounds, Model, Rules

FAST = {
    "two_ranks_move": Bounds(faults=0, moves=2, tokens=2),
    "loss_during_a_move": Bounds(faults=1, moves=1),
    "loss_during_a_join": Bounds(faults=1, moves=0, joins=1, suspects=False),
    "loss_of_one_of_three": Bounds(ranks=3, faults=1, moves=0),
    "losses_of_the_only_rank": Bounds(ranks=1, faults=3, moves=0, tokens=2),
    "loss_of_all": Bounds(faults=2, moves=0),
    "loss_of_all_during_a_move": Bounds(faults=2, moves=1, suspects=False),
}
LARGE = {
    "two_losses_of_three": Bounds(ranks=3, faults=2, moves=0, suspects=False),
    "two_losses_with_joins": Bounds(faults=2, moves=0, joins=2),
    "loss_during_a_move_or_join": Bounds(faults=1, moves=1, joins=1),
    "loss_during_a_move_of_three": Bounds(ranks=3, faults=1, moves=1, suspects=False),
    "loss_of_all_during_a_move_or_join": Bounds(faults=2, moves=1, joins=1, suspects=False),
    "three_losses_of_two_with_a_join": Bounds(faults=3, moves=0, joins=1, suspects=False),
    "loss_of_all_of_three": Bounds(ranks=3, faults=3, moves=0, suspects=False),
}


@pytest.mark.parametrize("name", FAST)
def test_every_interleaving_ends_well(name: str) -> None:
    outcome = Model(FAST[name]).explore()
    assert outcome.violation == "", outcome.trace
    assert outcome.finished > 0
    assert outcome.states > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_every_interleaving_of_larger_bounds_ends_well(name: str) -> None:
    outcome = Model(LARGE[name]).explore()
    assert outcome.violation == "", outcome.trace
    assert outcome.states > 20_000


MOVE, JOIN = Bounds(faults=1, moves=1), Bounds(faults=1, moves=1, joins=1)
BROKEN = {
    "regroups_before_the_process_ended": (Rules(await_end=False), MOVE, "is repeated"),
    "channel_not_read_to_its_end": (Rules(read_to_end=False), MOVE, "is repeated"),
    "step_in_flight_counts_as_done": (Rules(drop_steps=False), MOVE, "lost"),
    "cells_of_any_generation_count": (Rules(exact=False), JOIN, "different generations"),
    "switch_without_a_vote": (Rules(by_vote=False), Bounds(faults=0), "different generations|never finishes"),
    "slots_that_serve_are_overwritten": (Rules(free_slots=False), Bounds(faults=0), "which serves"),
    "switch_before_all_have_loaded": (Rules(await_loaded=False), MOVE, "does not hold"),
    "change_outlives_a_regroup": (Rules(forget_change=False), MOVE, "no live rank serves"),
    "generations_begin_anew": (
        Rules(count_on=False),
        FAST["loss_of_all_during_a_move"],
        "different generations",
    ),
    "nobody_ends_the_waits": (Rules(abort_waits=False), Bounds(faults=1, moves=0), "never finishes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_checker_finds_what_broken_generations_do(name: str) -> None:
    rules, bounds, expected = BROKEN[name]
    outcome = Model(bounds, rules).explore()
    assert any(word in outcome.violation for word in expected.split("|")), outcome.violation
    assert outcome.trace
