"""What two reports of one rank say about the time between them: expert balance, skew, overlap. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ep_server.observability.quantiles import NANO, balance
from ep_server.records import RankStatistics

NORMAL = "normal_"  # before the name of an operation that is one for many rows


def names_of(op: str) -> tuple[str, ...]:
    """Names under which ranks report dispatch or combine: one for each mode of the exchange."""
    return op, NORMAL + op


def op_and_mode(name: str) -> tuple[str, str]:
    """("dispatch", "normal") of normal_dispatch. The mode is that of exchange.mode; empty for a vote."""
    if name.startswith(NORMAL):
        return name.removeprefix(NORMAL), "normal"
    return name, "" if name == "vote" else "low_latency"


@dataclass(frozen=True, slots=True)
class Interval:
    """Two cumulative reports of one rank."""

    before: RankStatistics
    now: RankStatistics

    @property
    def steps(self) -> int:
        """Steps between the reports, at least 1."""
        return self.now.load.steps - self.before.load.steps

    def spent(self, *names: str) -> int:
        """Nanoseconds added to the sums of these names."""
        return sum(self.now.sums.get(name, 0) - self.before.sums.get(name, 0) for name in names)

    def expert_tokens(self) -> list[int]:
        """Tokens that each expert of this rank received."""
        before = self.before.expert_tokens
        return [number - before.get(expert, 0) for expert, number in self.now.expert_tokens.items()]


def expert_balance(intervals: Sequence[Interval]) -> tuple[float, float] | None:
    """(over ranks, over single experts): mean over maximum of the tokens received; 1 is even."""
    received = [tokens for interval in intervals if (tokens := interval.expert_tokens())]
    if not any(map(sum, received)):
        return None
    return balance(map(sum, received)), balance(number for tokens in received for number in tokens)


def step_skew(intervals: Sequence[Interval]) -> float | None:
    """Seconds per step that the earliest rank waits in the vote beyond the latest one."""
    waits = [interval.spent("vote/wait") * NANO / interval.steps for interval in intervals]
    return max(waits) - min(waits) if len(waits) > 1 else None


def overlap_ratio(interval: Interval) -> float | None:
    """Share of the time that dispatch and combine are in flight in which the rank did other work.

    Hidden is the time from the end of a send half to the begin of its receive half.
    """
    waited = hidden = 0
    for op in names_of("dispatch") + names_of("combine"):
        wait = interval.spent(f"{op}/wait")
        busy = interval.spent(f"{op}/send", f"{op}/expand", f"{op}/reduce")
        waited += wait
        hidden += max(interval.spent(f"{op}/total") - busy - wait, 0)
    return hidden / (hidden + waited) if hidden + waited else None
