"""The built emulation, as a fixture."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.support.exchange import emulated

SECONDS = 280


@cache
def module() -> Path:
    """Compiled once for a state of the sources."""
    folder = emulated.ROOT / "build" / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    return emulated.build(folder)
