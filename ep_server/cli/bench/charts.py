"""Results of a benchmark as one SVG with panels side by side. It follows the viewer's light or dark setting.

Drawn without a library, so that --chart works in a plain installation: matplotlib is not a dependency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle

from ep_server.cli.bench.breakdown import Steps
from ep_server.cli.bench.load import Trace
from ep_server.cli.bench.summary import Result, quantile
from ep_server.observability.status_chart import Axis, decades, halves

WIDTH, HEIGHT = 420, 300  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 40, 46  # margins inside it
LEGEND = 22  # height of the line below the panels
COLOURS = ("#2f81f7", "#d1495b", "#c9822b", "#3fa45b", "#8a63d2", "#1b9aaa", "#b8557a", "#6b8e23", "#9c6644")
BOUND_COLOUR = "#7d8590"
BOUND = "bound"  # name of the series that is dashed
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
CURVE = 100  # points of a latency curve
BINS = 40  # of time
Bounds = Mapping[str, float]
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2328}.title{font-size:14px;font-weight:600}"
    ".paper{fill:#fff}.grid{stroke:#d1d9e0;stroke-width:1}.line{fill:none;stroke-width:2}"
    ".bound{stroke-dasharray:5 4}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.paper{fill:#0d1117}.grid{stroke:#3d444d}}"
)


@dataclass(frozen=True, slots=True)
class Series:
    """points: (x, y), ascending in x. The series named BOUND is dashed."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Lines:
    """A panel of lines. marks: labelled x values, equally spaced. logarithmic: the y axis."""

    title: str
    x_name: str
    marks: Sequence[tuple[float, str]]
    series: Sequence[Series]
    logarithmic: bool = False

    @property
    def names(self) -> list[str]:
        """For the legend."""
        return [series.name for series in self.series]

    def draw(self, colours: Mapping[str, str]) -> str:
        """The panel, relative to its upper left corner."""
        values = [y for series in self.series for _, y in series.points]
        axis = decades(values) if self.logarithmic else halves(values)
        return "".join(
            (
                _frame(self.title, self.x_name, axis),
                *(_text(_place(self.marks, x), HEIGHT - BOTTOM + 18, name) for x, name in self.marks),
                *(self._line(series, axis, colours[series.name]) for series in self.series),
            )
        )

    def _line(self, series: Series, axis: Axis, colour: str) -> str:
        places = [(_place(self.marks, x), _height(axis, y)) for x, y in series.points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places) if places else ""
        bound = series.name == BOUND
        style = "line bound" if bound else "line"
        few = [] if bound or len(places) > len(self.marks) else places
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in few)
        return f'<path class="{style}" stroke="{colour}" d="{path}"/>{dots}'


@dataclass(frozen=True, slots=True)
class Bars:
    """A panel of stacked bars.

    bars: (label, height of each part by name). bounds: height of the dashed line of each bar, or empty.
    """

    title: str
    x_name: str
    bars: Sequence[tuple[str, Mapping[str, float]]]
    bounds: Sequence[float] = ()

    @property
    def names(self) -> list[str]:
        """For the legend."""
        parts = list(dict.fromkeys(name for _, parts in self.bars for name in parts))
        return [*parts, *([BOUND] if self.bounds else [])]

    def draw(self, colours: Mapping[str, str]) -> str:
        """The panel, relative to its upper left corner."""
        axis = halves([*(sum(parts.values()) for _, parts in self.bars), *self.bounds])
        drawn = [_frame(self.title, self.x_name, axis)]
        pitch = (WIDTH - LEFT - RIGHT) / max(len(self.bars), 1)
        width = min(0.6 * pitch, 70)
        for index, (name, parts) in enumerate(self.bars):
            middle, base = LEFT + (index + 0.5) * pitch, 0.0
            drawn.append(_text(middle, HEIGHT - BOTTOM + 18, name))
            for part, value in parts.items():
                top, bottom = _height(axis, base + value), _height(axis, base)
                drawn.append(
                    f'<rect x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                    f'height="{bottom - top:.1f}" fill="{colours[part]}"/>'
                )
                base += value
            if index < len(self.bounds):
                y = _height(axis, self.bounds[index])
                drawn.append(
                    f'<path class="line bound" stroke="{BOUND_COLOUR}" '
                    f'd="M{middle - 0.7 * width:.1f} {y:.1f}h{1.4 * width:.1f}"/>'
                )
        return "".join(drawn)


def svg(title: str, panels: Sequence[Lines | Bars]) -> str:
    """The chart: panels from left to right, each with its legend below."""
    rows = max((len(_legend_rows(panel.names)) for panel in panels), default=0)
    width, height = WIDTH * max(len(panels), 1), 30 + HEIGHT + LEGEND * rows + 8
    bodies = []
    for panel in panels:
        colours = dict(zip(panel.names, cycle(COLOURS), strict=False)) | {BOUND: BOUND_COLOUR}
        bodies.append(panel.draw(colours) + _legend(panel.names, colours))
    drawn = "".join(f'<g transform="translate({WIDTH * i} 30)">{body}</g>' for i, body in enumerate(bodies))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(title)}"><style>{STYLE}</style>'
        f'<rect class="paper" width="{width}" height="{height}"/>'
        f"{_text(width / 2, 22, title, 'title')}{drawn}</svg>\n"
    )


def offline_chart(title: str, results: Sequence[Result], least: Mapping[int, Bounds]) -> str:
    """Decode rate and step phases by batch size. least: bounds of the phases by batch, in seconds."""
    batches = sorted({result.batch for result in results})
    marks = [(float(batch), str(batch)) for batch in batches]

    def line(name: str, kind: str) -> Series:
        rates = [(float(result.batch), result.rate(kind)) for result in results]
        return Series(name, [(batch, rate) for batch, rate in rates if rate is not None])

    stepped: list[tuple[Result, Steps]] = [(r, r.steps) for r in results if r.steps is not None]
    # Tokens per second if each step took no longer than its bytes need.
    reach = [
        (float(r.batch), steps.tokens / sum(least[r.batch].values()))
        for r, steps in stepped
        if least.get(r.batch)
    ]
    rates = [line("directly", "direct"), line("by difference", "by_difference")]
    bars = [(str(r.batch), {k: 1000 * v for k, v in steps.phases.items()}) for r, steps in stepped]
    below = [1000 * sum(least.get(r.batch, {}).values()) for r, _ in stepped]
    name = "sequences per rank"
    return svg(
        title,
        [
            Lines("decode tokens/s, all ranks", name, marks, [*rates, Series(BOUND, reach)]),
            Bars("milliseconds of a decode step", name, bars, below),
        ],
    )


def online_chart(title: str, traces: Sequence[Trace]) -> str:
    """Latencies by share of requests, and tokens per second over time."""
    good = [trace for trace in traces if trace.ok]
    marks = [(share, f"{100 * share:g} %") for share in SHARES]
    kinds = {
        "first token": [t.first_token for t in good if t.first_token is not None],
        "mean gap": [t.mean_gap for t in good if t.mean_gap is not None],
        "end to end": [t.end_to_end for t in good],
    }
    curves = [Series(name, _curve(values)) for name, values in kinds.items() if values]
    return svg(
        title,
        [
            Lines("milliseconds, at most, of a share of requests", "", marks, curves, logarithmic=True),
            _over_time(traces),
        ],
    )


def _curve(seconds: Sequence[float]) -> list[tuple[float, float]]:
    ordered = sorted(seconds)
    return [(i / CURVE, 1000 * quantile(ordered, i / CURVE)) for i in range(CURVE + 1)]


def _over_time(traces: Sequence[Trace]) -> Lines:
    begin = min((trace.planned for trace in traces), default=0.0)
    end = max((trace.ended for trace in traces), default=begin)
    width = max(end - begin, 1e-9) / BINS
    counts = [0] * BINS
    for trace in traces:
        for time, tokens in trace.arrivals:
            counts[min(int((time - begin) / width), BINS - 1)] += tokens
    points = [((i + 0.5) * width, count / width) for i, count in enumerate(counts)]
    step = 10.0 ** math.floor(math.log10(max(end - begin, 1e-3)))
    step *= next(part for part in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if (end - begin) / (part * step) <= 6)
    marks = [(i * step, f"{i * step:.4g}") for i in range(math.ceil((end - begin) / step) + 1)]
    return Lines("tokens/s over time", "seconds", marks, [Series("tokens/s", points)])


def _frame(title: str, x_name: str, axis: Axis) -> str:
    marks = (axis.low, *axis.marks) if not axis.logarithmic else tuple(axis.marks)
    grid = "".join(
        f'<path class="grid" d="M{LEFT} {_height(axis, mark):.1f}H{WIDTH - RIGHT}"/>'
        + _text(LEFT - 8, _height(axis, mark) + 4, f"{mark:,.10g}", anchor="end")
        for mark in marks
    )
    middle = (LEFT + WIDTH - RIGHT) / 2
    return f"{_text(middle, TOP - 14, title)}{grid}{_text(middle, HEIGHT - 8, x_name)}"


def _height(axis: Axis, value: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - axis.part(value))


def _place(marks: Sequence[tuple[float, str]], x: float) -> float:
    """Position of x between the marks, which are equally spaced."""
    known = [mark for mark, _ in marks]
    if len(known) < 2:
        return (LEFT + WIDTH - RIGHT) / 2
    left = max((i for i, mark in enumerate(known[:-1]) if mark <= x), default=0)
    share = (left + (x - known[left]) / (known[left + 1] - known[left])) / (len(known) - 1)
    inset = 14
    return LEFT + inset + share * (WIDTH - LEFT - RIGHT - 2 * inset)


def _legend_rows(names: Sequence[str]) -> list[list[str]]:
    rows: list[list[str]] = [[]]
    for name in names:
        if rows[-1] and sum(map(_room, [*rows[-1], name])) > WIDTH - 20:
            rows.append([])
        rows[-1].append(name)
    return rows


def _room(name: str) -> float:
    return 30 + 6.6 * len(name)


def _legend(names: Sequence[str], colours: Mapping[str, str]) -> str:
    drawn = []
    for row, words in enumerate(_legend_rows(names)):
        x = (WIDTH - sum(map(_room, words))) / 2
        y = HEIGHT + LEGEND * row + 12
        for word in words:
            drawn.append(f'<rect x="{x:.1f}" y="{y - 9}" width="12" height="10" fill="{colours[word]}"/>')
            drawn.append(_text(x + 17, y, word, anchor="start"))
            x += _room(word)
    return "".join(drawn)


def _text(x: float, y: float, words: str, css: str = "", anchor: str = "middle") -> str:
    named = f' class="{css}"' if css else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
