"""`deep_ep.utils`: for code that makes its own events."""

from __future__ import annotations

from ep_server.compat.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
