"""Fixtures of the tests here."""

from tests.support.models.fixtures import fp8, one_thread, tiny

__all__ = ["fp8", "one_thread", "tiny"]
