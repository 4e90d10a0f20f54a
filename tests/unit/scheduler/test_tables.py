"""Every (state, event) pair of the lifecycle table, against a list written out here."""

from __future__ import annotations

import itertools

import pytest

from ep_server.scheduler.lifecycle import Event, IllegalTransition, State, advance

LIFECYCLE = {
    "queued": {"admit": "running", "cancel": "cancelled", "expire": "failed", "fail": "failed"},
    "running": {
        "preempt": "preempted",
        "finish": "finished",
        "cancel": "cancelled",
        "expire": "failed",
        "fail": "failed",
    },
    "preempted": {
        "admit": "running",
        "finish": "finished",
        "cancel": "cancelled",
        "expire": "failed",
        "fail": "failed",
    },
    "finished": {},
    "cancelled": {},
    "failed": {},
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_of_the_request_table(state, event):
    expected = LIFECYCLE[state].get(event)
    if expected is not None:
        assert advance(state, event, "r7") is State(expected)
        return
    with pytest.raises(IllegalTransition) as caught:
        advance(state, event, "r7")
    assert str(caught.value) == f"request 'r7': event {event} is illegal in state {state}"
    assert (caught.value.state, caught.value.event, caught.value.request) == (state, event, "r7")


def test_ended_states_are_those_without_events():
    assert {state for state in State if state.ended} == {State.FINISHED, State.CANCELLED, State.FAILED}
