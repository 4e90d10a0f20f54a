"""What a case of an alert is made of: series of one value a minute, and what fires at the end.

`steady` counts up by as much each minute; `then` changes the pace. `namespace`, `job` and `instance` are
added to all series.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Values = Sequence[float | str]
Series = dict[str, Values]
PAST, NOW = 100, 25  # minutes of history, and of what is being judged


@dataclass(frozen=True)
class Case:
    """series: all that there is. fires, summary: labels and text of the alert at the end; None: no alert."""

    series: Series
    fires: dict[str, str] | None = None
    summary: str = ""


@dataclass(frozen=True)
class AlertCases:
    """fires: one case or more in which it does. silent: name of a counter-case -> case."""

    fires: dict[str, Case]
    silent: dict[str, Case] = field(default_factory=dict)


def steady(per_minute: float, minutes: int = PAST + NOW) -> list[float]:
    """A counter."""
    return [per_minute * minute for minute in range(minutes)]


def then(before: float, after: float, minutes: int = NOW, past: int = PAST) -> list[float]:
    """A counter that changes its pace."""
    first = steady(before, past)
    return [*first, *(first[-1] + after * (minute + 1) for minute in range(minutes))]


def constant(value: float, minutes: int = PAST + NOW) -> list[float]:
    """A gauge."""
    return [value] * minutes


def cut(series: Series, minutes: int) -> Series:
    """Judged after so many minutes."""
    return {name: values[:minutes] for name, values in series.items()}
