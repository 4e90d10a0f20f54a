"""Fixtures of the tests here."""

from tests.support.ranks.fixtures import ranks_are_forks

__all__ = ["ranks_are_forks"]
