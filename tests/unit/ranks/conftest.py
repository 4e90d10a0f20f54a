"""Fixtures of the tests here."""

from tests.support.handoff.wire import there
from tests.support.ranks.fixtures import fp8_tiny, tiny

__all__ = ["fp8_tiny", "there", "tiny"]
