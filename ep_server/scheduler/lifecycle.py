"""States and events of a request, as one table.

FINISHED: it ended normally. CANCELLED: its caller left. FAILED: an error status (deadline, lost rank, bug).
"""

from __future__ import annotations

from enum import StrEnum

from ep_server.errors import InternalError


class State(StrEnum):
    """Where a request stands."""

    QUEUED = "queued"  # waits for its first admission
    RUNNING = "running"  # holds KV blocks and takes part in steps
    PREEMPTED = "preempted"  # gave its blocks back, keeps its tokens, waits to be run again
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """No event is legal any more."""
        return not _TABLE[self]


class Event(StrEnum):
    """What may happen to a request."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"
    CANCEL = "cancel"
    EXPIRE = "expire"  # its deadline passed
    FAIL = "fail"


_DROPPED = {Event.CANCEL: State.CANCELLED, Event.EXPIRE: State.FAILED, Event.FAIL: State.FAILED}

_TABLE: dict[State, dict[Event, State]] = {
    State.QUEUED: {Event.ADMIT: State.RUNNING, **_DROPPED},
    State.RUNNING: {Event.PREEMPT: State.PREEMPTED, Event.FINISH: State.FINISHED, **_DROPPED},
    # Finished: by a token that was drawn before it gave its blocks back.
    State.PREEMPTED: {Event.ADMIT: State.RUNNING, Event.FINISH: State.FINISHED, **_DROPPED},
    State.FINISHED: {},
    State.CANCELLED: {},
    State.FAILED: {},
}


class IllegalTransition(InternalError):
    """An event that the state of a request does not allow."""

    def __init__(self, state: State, event: Event, request: int | str) -> None:
        super().__init__(f"request {request!r}: event {event} is illegal in state {state}")
        self.state, self.event, self.request = state, event, request


def advance(state: State, event: Event, request: int | str) -> State:
    """The state after `event`.

    Args:
        request: id or number, named in the error.
    Raises: IllegalTransition.
    """
    try:
        return _TABLE[state][event]
    except KeyError:
        raise IllegalTransition(state, event, request) from None
