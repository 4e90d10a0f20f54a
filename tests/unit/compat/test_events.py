"""Waits for the streams of a Buffer's calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_server.compat.deep_ep.events import Streams
from ep_server.errors import InternalError

GPU = torch.device("cuda", 1)


class Stream:
    """One whose work ends after so many looks; None = never. Its event is itself."""

    def __init__(self, looks: int | None = 0, **_: Any) -> None:
        self.looks = looks

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        assert self.looks is not None, "waits without a deadline"

    def query(self) -> bool:
        if self.looks:
            self.looks -= 1
        return self.looks == 0


def streams(monkeypatch: pytest.MonkeyPatch, current: Stream, communication: Stream) -> Streams:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: communication)
    return Streams(GPU)


@pytest.mark.parametrize("hung", [0, 1])
def test_a_stream_that_hangs_is_an_error(hung: int, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Stream(None if number == hung else 3) for number in range(2)]
    with pytest.raises(InternalError, match=r"has not ended the calls of a Buffer in 0\.05 s"):
        streams(monkeypatch, *both).synchronize(0.05)


def test_both_streams_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Stream(3), Stream(5)]
    streams(monkeypatch, *both).synchronize(60)
    assert [stream.looks for stream in both] == [0, 0]
