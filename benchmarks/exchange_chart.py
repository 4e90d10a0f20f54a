"""Draws the exchange's latency over tokens from what bench_exchange.py --device cuda --json wrote.

    python benchmarks/exchange_chart.py ROWS.json docs/figures/exchange.svg    needs the extra 'chart'

One panel for each rank count: the pair in two kernels and in four, NCCL and the byte bound.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from chart_style import AMBER, BLUE, GREEN, INK, PAPER, RED, begin, dress, powers_of_two, write

SERIES = {
    "pair": ("pair", BLUE, "-", "o"),
    "halves": ("pair, halves apart", BLUE, ":", "o"),
    "AG+RS": ("NCCL all-gather + reduce-scatter", RED, "-", "s"),
    "A2A": ("NCCL all-to-all", AMBER, "-", "^"),
}


def panel(axes: plt.Axes, ranks: int, rows: list[dict[str, Any]]) -> None:
    """One rank count."""
    tokens = [row["case"]["tokens"] for row in rows]
    for name, (label, colour, line, mark) in SERIES.items():
        points = [
            (t, row["times_us"][name]["median"])
            for t, row in zip(tokens, rows, strict=True)
            if name in row["times_us"]
        ]
        if points:
            axes.plot(*zip(*points, strict=True), line, color=colour, marker=mark, markersize=4, label=label)
    if ranks > 1:
        axes.plot(
            tokens, [row["bound_us"] for row in rows], "--", color=GREEN, label="bytes sent at 375 GB/s"
        )
    axes.set_title(f"{ranks} GPU" + "s" * (ranks > 1), color=INK)
    powers_of_two(axes, [t for t in tokens if t & (t - 1) == 0], "tokens per GPU")
    dress(axes)


def draw(found: dict[str, Any]) -> plt.Figure:
    """All uniform rows in the usual form."""
    rows = [
        r
        for r in found["rows"]
        if (r["case"]["routing"], r["case"]["form"], r["case"]["wire"]) == ("uniform", "own", "bf16")
    ]
    counts = sorted({row["case"]["ranks"] for row in rows})
    if not counts:
        raise SystemExit("no row with uniform routing, form own and wire bf16")
    begin("exchange")
    figure, panels = plt.subplots(
        1, len(counts), figsize=(4.2 * len(counts), 4.2), sharey=True, squeeze=False, facecolor=PAPER
    )
    for axes, ranks in zip(panels[0], counts, strict=True):
        mine = sorted((r for r in rows if r["case"]["ranks"] == ranks), key=lambda r: r["case"]["tokens"])
        panel(axes, ranks, mine)
    panels[0][0].set_ylim(bottom=0)
    panels[0][0].set_ylabel("dispatch + combine, µs", color=INK)
    lines, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(lines, labels, loc="lower center", ncols=3, frameon=False, labelcolor=INK)
    case = rows[0]["case"]
    sizes = f"hidden {case['hidden']}, top-{case['top_k']} of {case['experts']}"
    figure.suptitle(f"{found['gpus']}: {sizes}, {case['payload'].upper()} out, BF16 back", color=INK)
    figure.tight_layout(rect=(0, 0.12, 1, 0.98))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("svg", type=Path)
    given = parser.parse_args()
    write(draw(json.loads(given.rows.read_text())), given.svg)


if __name__ == "__main__":
    main()
