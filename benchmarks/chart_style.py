"""What the charts of docs share: colours that stand out on light and dark paper, a panel's dress, the SVG.

Needs matplotlib: the extra 'chart'. An SVG follows the reader's light or dark setting; a viewer without one
shows it dark on white. The same figures give the same file.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

INK, PAPER, GRID = "#1f2328", "#ffffff", "#d1d9e0"
DARK = {INK: "#e6edf3", PAPER: "#0d1117", GRID: "#3d444d"}
BLUE, RED, AMBER, GREEN = "#2f81f7", "#d1495b", "#c9822b", "#3fa45b"


def begin(name: str) -> None:
    """Text stays text, and the ids of the SVG follow from the chart's name."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"})


def dress(axes: plt.Axes) -> None:
    """Ink, paper and grid, and no frame."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor(PAPER)
    axes.tick_params(colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def powers_of_two(axes: plt.Axes, values: list[int], label: str) -> None:
    """A logarithmic axis on which each of the values is named."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
    axes.set_xlabel(label, color=INK)


def write(figure: plt.Figure, path: Path) -> None:
    """The figure as an SVG, which it closes."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    path.write_text(in_both_lights(text.getvalue()))


def in_both_lights(svg: str) -> str:
    """The same with rules that turn ink, paper and grid for readers whose setting is dark."""
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    end = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:end]}<style>@media (prefers-color-scheme: dark){{{rules}}}</style>{svg[end:]}"
