"""Draws what fabric_simulator.py predicts: published rows with the model through them, and our exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chart_style
import matplotlib.pyplot as plt
from chart_style import AMBER, BLUE, GREEN, INK, PAPER, RED

KINDS = {
    "expert": ("a row per expert", RED),
    "rank": ("a row per rank", AMBER),
    "host": ("a row per host", BLUE),
    "host-sum": ("and a sum per host", GREEN),
}
PUBLISHED = ("deepep", "DeepEP, larger groups")
RANKS = "ranks, 8 to a host"


def write(found: dict[str, Any], path: Path) -> None:
    """The SVG of fabric_simulator.everything()."""
    chart_style.begin("fabric")
    figure, panels = plt.subplots(1, 3, figsize=(13.2, 4.2), facecolor=PAPER)
    published(panels[0], found["check"])
    exchange(panels[1], found["exchange"])
    decode(panels[2], found["steps"])
    for axes in panels:
        dress(axes)
    figure.tight_layout()
    chart_style.write(figure, path)


def published(axes: plt.Axes, check: dict[str, Any]) -> None:
    """Dots are published, lines predicted; the last two dots were not calibrated on."""
    listed = [row for name in PUBLISHED for row in check[name]]
    ranks = [row["ranks"] for row in listed]
    for index, (name, colour) in enumerate((("dispatch", BLUE), ("combine", RED))):
        axes.plot(ranks, [row["predicted_us"][index] for row in listed], "-", color=colour)
        dots = [row["published_us"][index] for row in listed]
        axes.plot(ranks, dots, "o", color=colour, markersize=5, label=f"{name}, published")
    axes.set_title("DeepEP V1, H800 + CX7: lines are the model", color=INK)
    axes.set_ylabel("µs", color=INK)
    chart_style.powers_of_two(axes, ranks, RANKS)


def exchange(axes: plt.Axes, rows: list[dict[str, Any]]) -> None:
    """The pair of the largest T, by copies."""
    most = max(row["case"]["tokens"] for row in rows)
    mine = [row for row in rows if row["case"]["tokens"] == most]
    for kind, (label, colour) in KINDS.items():
        line = [(r["ranks"], r["dispatch_us"] + r["combine_us"]) for r in mine if r["case"]["copies"] == kind]
        if line:
            axes.plot(*zip(*line, strict=True), "-o", color=colour, markersize=4, label=label)
    axes.set_title(f"predicted, H200 + 400 Gb/s: pair, T = {most}", color=INK)
    axes.set_ylabel("dispatch + combine, µs", color=INK)
    chart_style.powers_of_two(axes, sorted({row["ranks"] for row in mine}), RANKS)


def decode(axes: plt.Axes, rows: list[dict[str, Any]]) -> None:
    """Steps of the largest T with and without overlap."""
    most = max(row["tokens"] for row in rows)
    mine = [row for row in rows if row["tokens"] == most]
    for model, colour in zip(dict.fromkeys(row["model"] for row in mine), (BLUE, AMBER), strict=True):
        line = [row for row in mine if row["model"] == model]
        ranks = [row["ranks"] for row in line]
        axes.plot(ranks, [r["off_us"] / 1e3 for r in line], ":o", color=colour, markersize=4, label=model)
        axes.plot(
            ranks, [r["on_us"] / 1e3 for r in line], "-o", color=colour, markersize=4, label="overlapped"
        )
    axes.set_title(f"predicted decode step, T = {most}", color=INK)
    axes.set_ylabel("ms", color=INK)
    chart_style.powers_of_two(axes, ranks, RANKS)


def dress(axes: plt.Axes) -> None:
    """The dress of the other charts, and a legend."""
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    chart_style.dress(axes)
    axes.legend(frameon=False, labelcolor=INK, loc="upper left", ncols=2, fontsize="small")
