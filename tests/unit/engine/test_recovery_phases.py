"""When the memory of lost ranks is given up, and what is said about it."""

from __future__ import annotations

import logging

import pytest

from ep_server.engine.active_request import ActiveRequest
from ep_server.engine.observer import NullObserver
from ep_server.engine.recovery_phases import RecoveryPhases
from ep_server.engine.stream import TokenStream
from ep_server.records import Request, Sampling, Stopping


def active(number: int, output: int = 0, *, begun: bool = False) -> ActiveRequest:
    request = Request(str(number), number, (1,) * 20, Sampling(), Stopping(max_new_tokens=40))
    made = ActiveRequest(request, 0, None, TokenStream(8, 1, lambda _: None), 0.0)
    made.output_tokens, made.suspected = output, int(begun)
    return made


def phases() -> tuple[RecoveryPhases, list[str]]:
    settled = list[str]()
    return RecoveryPhases(NullObserver(), lambda: 0.0, lambda: settled.append("settled")), settled


def test_all_that_had_begun_must_have_a_token_or_have_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    made, settled = phases()
    made.lost(0.1)
    made.served(0.0)
    made.resumed([active(1, 10), active(2, begun=True), active(3), active(4, 5)])
    made.copied += 32
    made.token(4, cached=16)
    made.token(3, cached=4)  # only queued when its rank was lost
    made.settled(2)
    assert not settled
    made.token(1)
    assert settled == ["settled"]
    made.token(1)
    assert settled == ["settled"]
    assert "requests with 75 tokens went on; ranks copied 32 tokens from memory of the lost" in caplog.text
    assert "found 16 in their prefix caches" in caplog.text


def test_a_loss_without_requests_is_settled_at_once() -> None:
    made, settled = phases()
    made.lost(0.1)
    made.served(0.0)
    made.resumed([active(3)])
    assert settled == ["settled"]


def test_another_loss_waits_for_the_requests_of_both() -> None:
    """Even if those of the first have their tokens before those of the second are given again."""
    made, settled = phases()
    made.lost(0.1)
    made.resumed([active(1, 10), active(2, 10)])
    made.token(1)
    made.lost(0.1)
    made.token(2)
    assert not settled
    made.resumed([active(1, 10)])
    made.token(1)
    assert settled == ["settled"]
