"""`deep_ep.utils`: what code that makes events of its own imports."""

from __future__ import annotations

from ep_server.compat.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
