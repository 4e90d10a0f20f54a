"""Fixtures of the tests here."""

from tests.support.ranks.fixtures import fp8_tiny, ranks_are_forks, tiny

__all__ = ["fp8_tiny", "ranks_are_forks", "tiny"]
