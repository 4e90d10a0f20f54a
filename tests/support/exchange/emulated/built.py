"""The emulation, built once for all processes of a run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.support.exchange import emulated
from tests.support.once import locked

SECONDS = 280


@cache
def module() -> Path:
    """Compiled once for a state of the sources."""
    folder = emulated.ROOT / "build" / "emulated"
    with locked(folder / "lock"):
        return emulated.build(folder)
