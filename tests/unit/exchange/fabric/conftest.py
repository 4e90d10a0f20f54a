"""The library of libfabric that every test here finds under its own name."""

from __future__ import annotations

import pytest

from tests.support.fabric.fabric_ends import usable


@pytest.fixture(scope="session", autouse=True)
def _system_library_first() -> None:
    """A name without a folder finds what is loaded under it already, and the wheel's has that name, too."""
    usable("system")
