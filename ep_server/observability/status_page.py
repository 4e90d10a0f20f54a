"""Status page beside /metrics: self-contained, and complete without scripts.

The server renders tables and charts; the only script fetches the page again and swaps its <main>. A thread
samples the server every few seconds, so the page has a history when it is opened.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from ep_server.observability.status_chart import Line, Span, chart
from ep_server.observability.status_history import OPS, History, Snapshot, Window
from ep_server.records import RankStatistics

LOOK_SECONDS = 2.0
STOP_SECONDS = 5.0
SHORTEST_CHART = 120.0  # seconds, even if the server has just started
STANDS_OUT = 1.5  # a rank is named if others wait for it this many times the mean
NUMBERS_UP_TO = 64  # experts per rank; with more, cells show colour only
HEADERS = [
    ("Content-Type", "text/html; charset=utf-8"),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
]


class StatusPage:
    """Samples a server and renders the page. As a context it samples every few seconds in its own thread."""

    def __init__(self, look: Callable[[], Snapshot], model: str, version: str) -> None:
        self._look, self._model, self._version = look, model, version
        self._history = History()
        self.look()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="status", daemon=True)

    def __enter__(self) -> StatusPage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(STOP_SECONDS)

    def look(self) -> None:
        """Takes one sample."""
        self._history.add(self._look())

    def html(self) -> str:
        """The whole page."""
        return in_page(self._model, render(self._history, self._model, self._version))

    def respond(self, start_response: Callable[..., Any]) -> list[bytes]:
        """Answers a WSGI request."""
        return respond(start_response, self.html())

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self.look()


def in_page(title: str, main: str) -> str:
    """A whole page. title: text. main: HTML."""
    return _template().substitute(title=escape(title), main=main)


def respond(start_response: Callable[..., Any], html: str) -> list[bytes]:
    """Answers a WSGI request with a page."""
    body = html.encode()
    start_response("200 OK", [*HEADERS, ("Content-Length", str(len(body)))])
    return [body]


@cache
def _template() -> Template:
    return Template((files("ep_server") / "assets" / "status_page.html").read_text("utf-8"))


def render(history: History, model: str, version: str) -> str:
    """The contents of <main>."""
    window = history.window()
    span = f"last {window.seconds:.0f} s" if window.seconds else "since the start"
    parts = (
        _header(window, model, version),
        _tiles(window),
        f'<div class="grid">{_charts(history)}</div>',
        _ranks(window),
        f'<div class="grid">{_waits(window, span)}{_experts(window, span)}</div>',
        f"<footer>Rates, waits and expert loads are of the {span}; quantiles of dispatch and combine are at "
        f'most a factor of 2 off. Everything else: <a href="metrics">metrics</a>. '
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC</footer>",
    )
    return "\n".join(parts)


def _header(window: Window, model: str, version: str) -> str:
    up = window.now.up
    lost = [str(rank) for rank in sorted(up) if not up[rank]]
    if lost:
        state, text = "bad", f"rank {', '.join(lost)} lost"
    elif up:
        state, text = "good", f"{len(up)} rank{'s' if len(up) > 1 else ''} up"
    else:
        state, text = "wait", "starting"
    return (
        f"<header><div><h1>{escape(model)}</h1><p>ep_server {escape(version)}</p></div>"
        f'<strong class="state {state}">{text}</strong></header>'
    )


def _tiles(window: Window) -> str:
    loads = [rank.load for rank in window.now.ranks.values()]
    kv = max(
        (load.kv_blocks_used / load.kv_blocks_total for load in loads if load.kv_blocks_total), default=0
    )
    tiles = {
        "tokens/s": f"{window.tokens_per_second:,.0f}",
        "running": f"{window.now.running:,.0f}",
        "waiting": f"{window.now.waiting:,.0f}",
        "KV cache used": f"{kv:.0%}",
        "token gap p99": _duration(window.token_gap(0.99)),
        **{f"{op} p99": _duration((window.latency(op) or (None, None))[1]) for op in OPS},
    }
    return (
        '<dl class="tiles">'
        + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in tiles.items())
        + "</dl>"
    )


def _charts(history: History) -> str:
    points = history.points
    end = points[-1].at if points else 0.0
    start = min(points[0].at if points else 0.0, end - SHORTEST_CHART)
    rate = Line("tokens/s", "rate", [(p.at, p.tokens_per_second) for p in points])
    lines = [
        Line(f"{op} {name}", f"{op} {name}", [(p.at, p.latency[op][i]) for p in points if op in p.latency])
        for op in OPS
        for i, name in enumerate(("p50", "p99"))
    ]
    throughput = chart("Throughput", [rate], lambda value: f"{value:,.0f}", Span(start, end))
    return throughput + chart("Dispatch and combine", lines, _duration, Span(start, end, logarithmic=True))


def _ranks(window: Window) -> str:
    names = ("rank", "state", "running", "waiting", "KV blocks", "steps/s", "tokens/s", "idle steps")
    rows = [_rank(window, rank, up) for rank, up in sorted(window.now.up.items())]
    return _table("ranks", "Ranks", _losses(window.now), names, rows)


def _losses(now: Snapshot) -> str:
    """The losses since the start, if there were any."""
    if not now.losses:
        return ""
    causes = ", ".join(f"{count:.0f} by {escape(cause)}" for cause, count in sorted(now.losses.items()))
    return f"Generation {now.generation:.0f}. Lost ranks: {causes}. {now.recovered:.0f} requests continued."


def _rank(window: Window, rank: int, up: bool) -> str:
    load = window.now.ranks.get(rank, RankStatistics(rank)).load
    steps, seconds = window.steps(rank), window.seconds or math.inf
    idle = f"{window.counted(rank, 'idle_steps') / steps:.0%}" if steps else "–"
    part = load.kv_blocks_used / max(load.kv_blocks_total, 1)
    cells = (
        f'<td><span class="dot {"good" if up else "bad"}"></span>{"up" if up else "lost"}</td>',
        f"<td>{load.running}</td><td>{load.waiting}</td>",
        f'<td class="bar" style="--part:{part:.3f}">{load.kv_blocks_used:,} / {load.kv_blocks_total:,}</td>',
        f"<td>{steps / seconds:,.0f}</td><td>{window.counted(rank, 'tokens') / seconds:,.0f}</td>",
        f"<td>{idle}</td>",
    )
    return f'<tr><th scope="row">{rank}</th>{"".join(cells)}</tr>'


def _waits(window: Window, span: str) -> str:
    ranks = sorted(window.now.ranks)
    waits = {rank: window.waits(rank) for rank in ranks}
    every = [wait for row in waits.values() for wait in row.values()]
    # Even waits stay pale, however long. Three times the mean is dark.
    dark = max([*every, 3 * sum(every) / max(len(every), 1)])
    rows = []
    for rank in ranks:
        cells = "".join(
            "<td>–</td>" if peer == rank else _cell(waits[rank].get(peer, 0.0), dark) for peer in ranks
        )
        rows.append(f'<tr><th scope="row">{rank} waits</th>{cells}</tr>')
    note = f"Per step, {span}. {_slowest(window.awaited())}"
    return _table("waits", "Who waits for whom", note, ("", *(f"for {rank}" for rank in ranks)), rows)


def _slowest(awaited: dict[int, float]) -> str:
    """Names the rank that the others wait for, if one stands out."""
    if len(awaited) < 2 or not any(awaited.values()):
        return ""
    worst = max(awaited, key=awaited.__getitem__)
    others = (sum(awaited.values()) - awaited[worst]) / (len(awaited) - 1)
    if awaited[worst] < STANDS_OUT * others:
        return "No rank stands out."
    return f"The others wait for <b>rank {worst}</b>: {_duration(awaited[worst])} each."


def _experts(window: Window, span: str) -> str:
    tokens = {rank: window.expert_tokens(rank) for rank in sorted(window.now.ranks)}
    most = max((count for row in tokens.values() for count in row.values()), default=0)
    rows = []
    for rank, row in tokens.items():
        cells = "".join(_expert(expert, row[expert], most, len(row) <= NUMBERS_UP_TO) for expert in row)
        rows.append(f'<tr><th scope="row">rank {rank}</th><td class="cells">{cells}</td></tr>')
    note = f"Tokens each expert received, {span}. Balance over ranks {window.expert_balance():.2f} of 1."
    return _table("experts", "Experts", note, ("", "expert and its tokens"), rows)


def _expert(expert: int, tokens: int, most: int, number: bool) -> str:
    text = f"{expert} <small>{tokens:,}</small>" if number else ""
    heat = f"--heat:{tokens / max(most, 1):.3f}"
    return f'<i class="heat" style="{heat}" title="expert {expert}: {tokens:,} tokens">{text}</i>'


def _table(css: str, title: str, note: str, names: tuple[str, ...], rows: list[str]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(rows) or f'<tr><td colspan="{len(names)}">no report of a rank yet</td></tr>'
    return (
        f'<section class="{css}"><h2>{title}</h2><p>{note}</p><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _cell(value: float, dark: float) -> str:
    return f'<td class="heat" style="--heat:{value / dark if dark else 0:.3f}">{_duration(value)}</td>'


def _duration(seconds: float | None) -> str:
    """Three digits and a unit."""
    if seconds is None:
        return "–"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit * 0.9995:
            return f"{seconds / unit:.3g} {name}"
    return "0" if seconds < 5e-10 else f"{seconds * 1e6:.2g} µs"
