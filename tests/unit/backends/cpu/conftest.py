"""Fixtures of the tests here."""

from tests.support.sampling import one_thread

__all__ = ["one_thread"]
