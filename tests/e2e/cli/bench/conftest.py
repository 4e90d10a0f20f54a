"""Fixtures of the tests here. What they execute as commands executes its ranks too."""

from tests.support.ranks.fixtures import ranks_are_forks

__all__ = ["ranks_are_forks"]
