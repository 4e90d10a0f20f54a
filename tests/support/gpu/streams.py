"""Streams and events of a device that is late."""

from __future__ import annotations


class Passed:
    """An event that the device has passed at that look."""

    def __init__(self, looks: float) -> None:
        self.left = looks

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0


class PassedStream:
    """It comes to the end of its work at that look."""

    def __init__(self, looks: float) -> None:
        self.event = Passed(looks)

    def record_event(self) -> Passed:
        return self.event
