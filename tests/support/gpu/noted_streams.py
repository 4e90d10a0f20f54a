"""Stand-ins for streams of a device that note what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class Stream:
    """`name` and what it is asked for go to `notes`; an event is named by their number."""

    def __init__(self, notes: list[str], name: str) -> None:
        self._notes, self.name = notes, name

    def record_event(self) -> str:
        self._notes.append(f"{self.name} records")
        return f"event {len(self._notes)}"

    def wait_event(self, event: str) -> None:
        self._notes.append(f"{self.name} waits for {event}")


def note_streams(patch: pytest.MonkeyPatch, notes: list[str]) -> None:
    """The current stream is "main", others are "side"; forgets what was noted before."""
    notes.clear()
    main = Stream(notes, "main")

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        notes.append(f"on {stream.name}")
        yield
        notes.append("on main")

    patch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(notes, "side"))
    patch.setattr(torch.cuda, "current_stream", lambda: main)
    patch.setattr(torch.cuda, "stream", inside)
