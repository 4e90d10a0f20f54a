"""Line charts of the status page, drawn as SVG on the server.

The SVG contains only lines, so it can be stretched. Words and numbers are HTML text beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 300, 100
GAP_SECONDS = 10.0  # a longer time without values interrupts the line
Value = tuple[float, float]  # (time, value)


@dataclass(frozen=True, slots=True)
class Line:
    """css: class of the line, and of its mark in the legend. values: in order of time."""

    name: str
    css: str
    values: Sequence[Value]


def chart(title: str, lines: Sequence[Line], show: Callable[[float], str], span: Span) -> str:
    """A chart over a time span, as a <figure>."""
    found = [value for line in lines for time, value in line.values if time >= span.start]
    axis = decades(found) if span.logarithmic else halves(found)
    paths = "".join(f'<path class="{line.css}" d="{_path(line, span, axis)}"/>' for line in lines)
    heights = [(mark, HEIGHT * (1 - axis.part(mark))) for mark in axis.marks]
    grid = "".join(f'<path class="grid" d="M0 {y:.1f}H{WIDTH}"/>' for _, y in heights)
    words = "".join(f'<span style="top:{100 * y / HEIGHT:.1f}%">{show(mark)}</span>' for mark, y in heights)
    legend = "".join(
        f'<li class="{line.css}">{escape(line.name)} '
        f"<b>{show(line.values[-1][1]) if line.values else '–'}</b></li>"
        for line in lines
    )
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption><ul class="legend">{legend}</ul>'
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{grid}{paths}</svg>{words}</div>'
        f'<p class="axis"><span>{span.seconds / 60:.2g} min ago</span><span>now</span></p></figure>'
    )


@dataclass(frozen=True, slots=True)
class Span:
    """The time span of a chart, and whether its scale is logarithmic."""

    start: float
    end: float
    logarithmic: bool = False

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Axis:
    """low, high: values at the bottom and the top. marks: values with a line and a number."""

    low: float
    high: float
    marks: Sequence[float]
    logarithmic: bool = False

    def part(self, value: float) -> float:
        """The height of a value, 0 to 1."""
        if self.logarithmic:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def halves(values: Sequence[float]) -> Axis:
    """From 0 to the next of 1, 2, 4, 6, 8 times a power of ten, whose halves read well."""
    most = max(values, default=0.0)
    if most <= 0:
        return Axis(0.0, 1.0, (1.0,))
    power = 10.0 ** math.floor(math.log10(most))
    high = next(power * step for step in (1, 2, 4, 6, 8, 10, 20) if power * step >= most)
    return Axis(0.0, high, (high / 2, high))


def decades(values: Sequence[float]) -> Axis:
    """From one power of ten to another; values of 0 lie at the bottom."""
    positive = [value for value in values if value > 0] or [1e-6]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    exponents = range(low, max(high, low + 1) + 1)
    return Axis(10.0**low, 10.0 ** exponents[-1], tuple(10.0**e for e in exponents[1:]), logarithmic=True)


def _path(line: Line, span: Span, axis: Axis) -> str:
    path, last = [], -math.inf
    for time, value in line.values:
        if time >= span.start:
            x, y = (time - span.start) / span.seconds * WIDTH, HEIGHT * (1 - axis.part(value))
            path.append(f"{'L' if time - last <= GAP_SECONDS else 'M'}{x:.1f} {y:.1f}")
            last = time
    return "".join(path)
