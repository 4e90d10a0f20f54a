"""Parts of a suite that run beside each other on one machine: which tests are in which. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

HEAVY = 20  # a function of more cases runs them all in one group of processes, which costs about as much
RANKS = (4, 3, 2, 1, 0)  # that tests have; 0: those that need no GPU
PAIR = 2  # ranks of a test for GPUs that does not say how many it has


@dataclass(frozen=True)
class Part:
    """Part `number` of `count` of the tests of so many ranks that are slow, or that are not.

    ranks: one of RANKS.
    """

    ranks: int
    slow: bool
    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """From text such as 4:1/2 or 4-slow:1/1. Raises UsageError."""
        found = re.fullmatch(r"(\d+)(-slow)?:(\d+)/(\d+)", text)
        part = found and cls(int(found[1]), bool(found[2]), int(found[3]), int(found[4]))
        if not part or part.ranks not in RANKS or not 1 <= part.number <= part.count:
            raise pytest.UsageError(
                f"--part={text}: must be RANKS[-slow]:I/N, ranks of {RANKS}, I from 1 to N"
            )
        return part

    def of(self, items: Iterable[pytest.Item]) -> list[pytest.Item]:
        """Those in this part, in their order. Cases of a function stay together: they may share processes."""
        mine = [each for each in items if (ranks_of(each), is_slow(each)) == (self.ranks, self.slow)]
        functions: dict[str, list[pytest.Item]] = {}
        for each in mine:
            functions.setdefault(each.nodeid.partition("[")[0], []).append(each)
        dealt = deal([min(len(cases), HEAVY) for cases in functions.values()], self.count)
        chosen = {name for name, to in zip(functions, dealt, strict=True) if to == self.number - 1}
        return [each for each in mine if each.nodeid.partition("[")[0] in chosen]


def deal(costs: Sequence[int], count: int) -> list[int]:
    """Which of `count` parts each of these goes to, so that all cost about the same."""
    sums, parts = [0] * count, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        parts[i] = min(range(count), key=sums.__getitem__)
        sums[parts[i]] += costs[i]
    return parts


def ranks_of(item: pytest.Item) -> int:
    """How many GPUs it has a use for, one of RANKS. Raises UsageError where no part would have it."""
    if item.get_closest_marker("gpu") is None:
        return 0
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    hosts = params.get("hosts")
    ranks = len(hosts) if hosts else int(params.get("num_ranks", params.get("num_gpus", PAIR)))
    if ranks not in RANKS:
        raise pytest.UsageError(f"{item.nodeid} has {ranks} ranks: no part for it, only for {RANKS}")
    return ranks


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None
