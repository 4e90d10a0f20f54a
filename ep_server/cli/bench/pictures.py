"""Which panels show a benchmark: decode rate and where a step goes, or latencies and the rate over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ep_server.cli.bench.breakdown import Steps
from ep_server.cli.bench.chart import BOUND, Bars, Lines, Series, svg
from ep_server.cli.bench.offline_plan import Result
from ep_server.cli.bench.report import quantile
from ep_server.cli.bench.trace import Trace

SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
CURVE = 100  # points of a curve of shares
BINS = 40  # of time
Bounds = Mapping[str, float]


def offline(title: str, results: Sequence[Result], least: Mapping[int, Bounds]) -> str:
    """Decode rate and the parts of a step, by batch size. least: bounds of phases by batch, seconds."""
    batches = sorted({result.batch for result in results})
    marks = [(float(batch), str(batch)) for batch in batches]

    def line(name: str, kind: str) -> Series:
        rates = [(float(result.batch), result.rate(kind)) for result in results]
        return Series(name, [(batch, rate) for batch, rate in rates if rate is not None])

    stepped: list[tuple[Result, Steps]] = [(r, r.steps) for r in results if r.steps is not None]
    # As many tokens as the steps had, in the least time that their bytes take.
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


def online(title: str, traces: Sequence[Trace]) -> str:
    """Latencies by the share of requests that kept them, and tokens per second over time."""
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
