"""Fixtures of the tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks.fixtures import fp8_tiny, tiny
from tests.support.ranks.zygote import forking

__all__ = ["fp8_tiny", "tiny"]


@pytest.fixture(scope="package", autouse=True)
def _ranks_are_forks() -> Iterator[None]:
    """A rank's imports take longer than most of these tests. Tests elsewhere start ranks as a server does."""
    with forking():
        yield
