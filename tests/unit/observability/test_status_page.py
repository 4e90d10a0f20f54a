"""The status page: what it says against numbers worked out by hand, and what a server sends."""

from __future__ import annotations

import urllib.request
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ep_server.cli.app import assemble
from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.config import Config
from ep_server.observability.status_chart import decades, halves
from ep_server.observability.status_history import History, Snapshot, Window
from ep_server.observability.status_page import render
from ep_server.records import RankStatistics
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.observability.reports import RANKS, STEPS, bucketed, snapshot


class Tables(HTMLParser):
    """Every table as rows of cell texts, by the class of its section; what no script has touched."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self.open: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self._rows = self.tables.setdefault(dict(attrs)["class"] or "", [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """<path/>: nothing to close."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self.open):
            self._rows[-1][-1] += data


def test_a_replaced_rank_counts_from_zero() -> None:
    """Its report is smaller than the one before, and its histograms are shorter."""
    before, now = snapshot(10.0, 50 * STEPS), snapshot(20.0, 51 * STEPS)
    new = replace(snapshot(20.0, STEPS).ranks[1], histograms={"dispatch/total": (0, 1)})
    window = Window(before, replace(now, ranks={**now.ranks, 1: new}))
    assert window.steps(1) == window.steps(0) == STEPS
    assert window.latency("dispatch") is not None
    assert min(window.expert_tokens(1).values(), default=0) >= 0


@pytest.mark.parametrize("late", [0, 2])
def test_the_matrix_names_the_rank_that_all_wait_for(late: int) -> None:
    history = History()
    history.add(snapshot(10.0, STEPS))  # before, nobody was late: what was then is not shown
    history.add(snapshot(20.0, 2 * STEPS, late, late_steps=STEPS))
    page = Tables(render(history, "m", "1"))
    rows = page.tables["waits"]
    assert rows[0] == ["", "for 0", "for 1", "for 2"]
    for rank, row in enumerate(rows[1:]):
        expected = ["–" if p == rank else "4 ms" if p == late else "20 µs" for p in range(RANKS)]
        assert row == [f"{rank} waits", *expected]
    assert f"The others wait for rank {late}: 4 ms each." in page.text


def test_losses_are_counted_by_cause() -> None:
    history = History()
    history.add(snapshot(10.0, STEPS))
    assert "Generation" not in Tables(render(history, "m", "1")).text
    history.add(
        replace(snapshot(20.0, 2 * STEPS), generation=3.0, losses={"hang": 1.0, "signal": 2.0}, recovered=9.0)
    )
    text = Tables(render(history, "m", "1")).text
    assert "Generation 3. Lost ranks: 1 by hang, 2 by signal. 9 requests continued." in text


def test_no_rank_is_named_where_all_wait_alike() -> None:
    history = History()
    history.add(snapshot(10.0, STEPS))
    assert "No rank stands out." in Tables(render(history, "m", "1")).text


def test_ranks_and_experts_are_of_the_last_seconds() -> None:
    history = History()
    history.add(snapshot(10.0, STEPS))
    lost = snapshot(14.0, 3 * STEPS)
    history.add(replace(lost, up={**lost.up, 1: False}))
    page = Tables(render(history, "m", "1"))
    assert page.tables["ranks"][1] == ["0", "up", "2", "0", "10 / 40", "50", "400", "25%"]
    assert page.tables["ranks"][2] == ["1", "lost", "2", "1", "20 / 40", "50", "400", "25%"]
    assert "rank 1 lost" in page.text
    # 200 steps: 30 tokens each for the first expert of a rank, 10, 20, 30 for the second
    assert page.tables["experts"][1:] == [
        ["rank 0", "0 6,0001 2,000"],
        ["rank 1", "2 6,0003 4,000"],
        ["rank 2", "4 6,0005 6,000"],
    ]
    assert "Balance over ranks 0.83 of 1." in page.text  # 10,000 of 12,000
    for words in ("tokens/s2,000", "running6", "waiting3", "KV cache used75%", "token gap p993.96 ms"):
        assert words in page.text.replace("\n", "")


def test_quantiles_of_a_window_leave_out_what_was_before() -> None:
    fast, slow = snapshot(0.0, 0), snapshot(1.0, 0)
    before = RankStatistics(0, histograms={"dispatch/total": bucketed([1_000_000] * 1000)})
    after = RankStatistics(0, histograms={"dispatch/total": bucketed([1_000_000] * 1000 + [8_000_000] * 50)})
    window = Window(replace(fast, ranks={0: before}), replace(slow, ranks={0: after}))
    low, high = window.latency("dispatch") or (0.0, 0.0)
    assert 0.004 <= low <= high <= 0.0085  # within the bucket from 2^22 ns
    assert Window(fast, fast).latency("dispatch") is None
    assert Window(fast, replace(slow, token_gaps=fast.token_gaps)).token_gap(0.99) is None


def test_a_server_without_ranks_or_steps_has_a_page() -> None:
    history = History()
    history.add(Snapshot(at=5.0))
    page = Tables(render(history, '<b>"m"&', "1"))
    assert "starting" in page.text and "no report of a rank yet" in page.text
    assert '<b>"m"&' in page.text  # as text, not as a tag
    history.add(Snapshot(at=7.0, up={0: True}))
    assert Tables(render(history, "m", "1")).tables["ranks"][1][:2] == ["0", "up"]


def test_axes_hold_their_values() -> None:
    for values in ([0.0], [3.0], [0.7, 1e-3], [8.1e5], [10.0], [1.0]):
        axis = halves(values)
        assert axis.low == 0 and max(values) <= axis.high
        assert all(0 <= axis.part(value) <= 1 for value in values)
    for values in ([2e-6], [1e-3], [1e-6, 0.3], [0.0, 5e-4], []):
        axis = decades(values)
        assert all(0 <= axis.part(value) <= 1 for value in values)
        assert axis.part(axis.marks[-1]) == pytest.approx(1)


async def test_a_server_shows_itself_beside_its_metrics() -> None:
    flags = {"model.path": str(DEMO_MODEL), "grpc.port": 0, "metrics.port": 0}
    async with assemble(Config.load(flags=flags, environ={}), FakeRanks(2)) as app:
        await app.server.start(lambda *_: None)
        with urllib.request.urlopen(app.metrics_url.removesuffix("metrics"), timeout=30) as answer:
            html, headers = answer.read().decode(), answer.headers
        await app.server.stop()
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "demo_model" in html and "http://" not in html and "https://" not in html
