"""Draws the exchange's latency over tokens from what bench_exchange.py --device cuda --json wrote.

    python benchmarks/exchange_chart.py ROWS.json docs/exchange.svg    needs matplotlib: the extra 'chart'

One panel for each rank count: the pair in two kernels and in four, NCCL and the byte bound. The SVG follows
the reader's light or dark setting; a viewer without one shows it dark on white.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

INK, PAPER, GRID = "#1f2328", "#ffffff", "#d1d9e0"
DARK = {INK: "#e6edf3", PAPER: "#0d1117", GRID: "#3d444d"}
# Colours that stand out on both papers.
SERIES = {
    "pair": ("pair", "#2f81f7", "-", "o"),
    "halves": ("pair, halves apart", "#2f81f7", ":", "o"),
    "AG+RS": ("NCCL all-gather + reduce-scatter", "#d1495b", "-", "s"),
    "A2A": ("NCCL all-to-all", "#c9822b", "-", "^"),
}
BOUND = "#3fa45b"


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
            tokens, [row["bound_us"] for row in rows], "--", color=BOUND, label="bytes sent at 375 GB/s"
        )
    axes.set_title(f"{ranks} GPU" + "s" * (ranks > 1), color=INK)
    axes.set_xscale("log", base=2)
    powers = [t for t in tokens if t & (t - 1) == 0]
    axes.set_xticks(powers, [str(t) for t in powers])
    axes.minorticks_off()
    axes.set_xlabel("tokens per GPU", color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor(PAPER)
    axes.tick_params(colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw(found: dict[str, Any]) -> str:
    """The SVG of all uniform rows in the usual form."""
    rows = [
        r
        for r in found["rows"]
        if (r["case"]["routing"], r["case"]["form"], r["case"]["wire"]) == ("uniform", "own", "bf16")
    ]
    counts = sorted({row["case"]["ranks"] for row in rows})
    if not counts:
        raise SystemExit("no row with uniform routing, form own and wire bf16")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "exchange", "font.family": "sans-serif"})
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
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def in_both_lights(svg: str) -> str:
    """The same with rules that turn ink, paper and grid for readers whose setting is dark."""
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    end = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:end]}<style>@media (prefers-color-scheme: dark){{{rules}}}</style>{svg[end:]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("svg", type=Path)
    given = parser.parse_args()
    given.svg.write_text(in_both_lights(draw(json.loads(given.rows.read_text()))))


if __name__ == "__main__":
    main()
