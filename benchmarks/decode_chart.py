"""Draws decode rates over sequences per GPU, and where a step goes, from the figures of docs/benchmarks.md.

    python benchmarks/decode_chart.py docs/figures/decode.json    needs matplotlib: the extra 'chart'

Writes decode.svg and decode_step.svg beside the file. A point of a series lists a value for each machine or
run: the line goes through the first ones, the others are dots.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from chart_style import AMBER, BLUE, GREEN, INK, PAPER, RED, begin, dress, powers_of_two, write

# By the kind of a series: colour, line, mark and its size.
KINDS = {
    "ours": (BLUE, "-", "o", 5),
    "vllm": (RED, "-", "s", 4),
}
# Where a series that says "labels" has its values: points right and up of the mark, and the side of the text.
LABELS = {"above": ((-5, 5), "right"), "below": ((10, -12), "left")}
GREY, PURPLE, TEAL = "#8b949e", "#8a63d2", "#2a9d8f"
PHASES = {
    "experts": BLUE,
    "attention": AMBER,
    "router": PURPLE,
    "dispatch": RED,
    "combine": GREEN,
    "sampling and head": TEAL,
    "waits for the host": GREY,
}
WIDE_MS = 0.85  # a part of a bar that has room for its figure


def rates(found: dict[str, Any]) -> plt.Figure:
    """A panel for each number of GPUs, all on one scale."""
    begin("decode")
    figure, panels = plt.subplots(1, len(found["rates"]), figsize=(13.2, 4.6), sharey=True, facecolor=PAPER)
    for axes, drawn in zip(panels, found["rates"], strict=True):
        for series in drawn["series"]:
            line(axes, series)
        axes.set_title(drawn["title"], color=INK)
        powers_of_two(axes, [8, 16, 32, 64, 128, 256], "sequences per GPU")
        axes.set_xlim(6, 360)
        dress(axes)
        axes.legend(frameon=False, labelcolor=INK, loc="upper left", fontsize="small")
    panels[0].set_ylim(0, 30_000)
    panels[0].yaxis.set_major_formatter("{x:,.0f}")
    panels[0].set_ylabel("tokens/s per GPU", color=INK)
    figure.suptitle(f"{found['gpus']}: {found['shape']}, {found['lengths']}", color=INK)
    figure.tight_layout()
    return figure


def line(axes: plt.Axes, series: dict[str, Any]) -> None:
    """One series: a line through each point's first value, dots for the others."""
    colour, style, mark, size = KINDS[series["kind"]]
    points = sorted((int(count), values) for count, values in series["points"].items())
    first = [(count, values[0]) for count, values in points]
    others = [(count, value) for count, values in points for value in values[1:]]
    form = {"color": colour, "marker": mark, "markersize": size, "markeredgewidth": 1.6}
    axes.plot(*zip(*first, strict=True), linestyle=style, label=series["name"], **form)
    if others:
        axes.plot(*zip(*others, strict=True), linestyle="none", markerfacecolor=PAPER, **form)
    if "labels" in series:
        offset, side = LABELS[series["labels"]]
        form = {"textcoords": "offset points", "ha": side, "fontsize": 9, "color": INK}
        for count, value in first:
            axes.annotate(f"{value:,}", (count, value), offset, **form)


def step(found: dict[str, Any]) -> plt.Figure:
    """A bar for each case, its phases one behind the other, and a tick where the whole step ends."""
    begin("decode_step")
    phases, bars = found["step"]["phases"], found["step"]["bars"]
    figure, axes = plt.subplots(figsize=(11, 0.5 * len(bars) + 1.3), facecolor=PAPER)
    rows = range(len(bars))
    starts = [0.0] * len(bars)
    for name, colour in PHASES.items():
        lengths = [bar["ms"][phases.index(name)] for bar in bars]
        axes.barh(rows, lengths, left=starts, height=0.66, color=colour, label=name)
        for row, length, start in zip(rows, lengths, starts, strict=True):
            if length >= WIDE_MS:
                middle = start + length / 2
                axes.text(middle, row, f"{length:.2f}", ha="center", va="center", fontsize=9, color="#fdfdfd")
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    for row, end, bar in zip(rows, starts, bars, strict=True):
        axes.plot([bar["all"]] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=2)
        axes.text(max(end, bar["all"]) + 0.15, row, f"{bar['all']:.2f}", va="center", fontsize=9, color=INK)
    axes.set_yticks(rows, [bar["name"] for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * max(starts))
    axes.set_title(f"where a step goes, {found['gpus']}: {found['shape']}", color=INK)
    axes.set_xlabel("ms; the tick: a whole step, without stamps between its phases", color=INK)
    dress(axes)
    axes.grid(visible=False, axis="y")
    axes.legend(frameon=False, labelcolor=INK, loc="lower right", fontsize="small")
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", type=Path)
    given = parser.parse_args().figures
    found = json.loads(given.read_text())
    write(rates(found), given.with_suffix(".svg"))
    write(step(found), given.with_name(f"{given.stem}_step.svg"))


if __name__ == "__main__":
    main()
