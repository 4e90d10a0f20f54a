"""Every (state, event) pair of the two state tables, against lists written out here."""

from __future__ import annotations

import itertools

import pytest

from ep_server.errors import InternalError
from ep_server.scheduler.lifecycle import Event, IllegalTransition, State, advance
from ep_server.scheduler.membership import GroupEvent, GroupState, Membership

LIFECYCLE = {
    "queued": {"admit": "running", "cancel": "cancelled", "expire": "failed", "fail": "failed"},
    "running": {
        "preempt": "preempted",
        "finish": "finished",
        "cancel": "cancelled",
        "expire": "failed",
        "fail": "failed",
    },
    "preempted": {"admit": "running", "cancel": "cancelled", "expire": "failed", "fail": "failed"},
    "finished": {},
    "cancelled": {},
    "failed": {},
}

GROUP = {
    "starting": {"ready": "serving", "drain": "draining", "lose": "lost"},
    "serving": {"drain": "draining", "lose": "lost"},
    "draining": {"ready": "draining", "drain": "draining", "lose": "lost"},
    "lost": {"drain": "lost", "lose": "lost", "reform": "starting"},
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


@pytest.mark.parametrize(("state", "event"), list(itertools.product(GroupState, GroupEvent)))
def test_every_pair_of_the_group_table(state, event):
    group = Membership(num_ranks=4, state=state, generation=5)
    expected = GROUP[state].get(event)
    if expected is None:
        with pytest.raises(InternalError, match=f"generation 5.*event {event} is illegal in state {state}"):
            group.after(event)
        return
    generation = 6 if event is GroupEvent.REFORM else 5
    assert group.after(event) == Membership(4, GroupState(expected), generation)
    assert group.after(event).accepts == (expected == "serving")


def test_only_a_reformed_group_has_other_ranks():
    lost = Membership(4).after(GroupEvent.LOSE)
    assert lost.after(GroupEvent.REFORM, num_ranks=3) == Membership(3, GroupState.STARTING, 1)
    with pytest.raises(InternalError, match="cannot change the number of ranks"):
        Membership(4).after(GroupEvent.READY, num_ranks=3)
