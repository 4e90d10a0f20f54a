"""A real Prometheus with the chart's rules on a real server under load. Seconds stand for minutes here: every
duration of the rules is divided by the same number, and nothing else of them is changed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.observability.files import DASHBOARDS, RULES, dashboard, faster, queries
from tests.support.observability.load import odd_requests, served, steady_load
from tests.support.observability.prometheus import Prometheus, Vector, scraping
from tests.support.raw_client import RawClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus"),
]
FACTOR = 60
SLOW_RANK = "2"
PLACEHOLDERS = {"$namespace": ".*", "$job": ".*", "$instance": ".*", "$rank": ".*", "$__rate_interval": "5s"}
SELECTOR = r"(?:epserver[\w:]*|process_\w+|ALERTS)(?:\{[^}]*\})?(\[\w+\])?(?: offset \w+)?"


def panel_expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every panel and annotation, all choices open."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        for title, expression in queries(dashboard(path.stem)):
            filled = re.sub(r"\$\w+", lambda found: PLACEHOLDERS[found.group()], expression)
            yield f"{path.stem}: {title}", filled


def rule_expressions() -> Iterator[tuple[str, str]]:
    """(rule, expression): of a recording rule itself; of an alert, which is quiet, everything it looks at."""
    for rule in (rule for group in faster(FACTOR) for rule in group["rules"]):
        if "record" in rule:
            yield rule["record"], rule["expr"]
            labels = ", ".join(f'{name}="{value}"' for name, value in rule.get("labels", {}).items())
            yield rule["record"], f"{rule['record']}{{{labels}}}"
            continue
        for found in re.finditer(SELECTOR, rule["expr"]):
            looked_at = found.group()
            yield rule["alert"], f"count_over_time({looked_at})" if found.group(1) else looked_at


async def odd_ends(client: RawClient) -> None:
    while True:
        await odd_requests(client)
        await asyncio.sleep(1)


async def test_no_expression_of_a_rule_or_panel_is_dead(tmp_path: Path) -> None:
    wanted = [*rule_expressions(), *panel_expressions()]
    assert len(list(RULES.glob("*.yaml"))) == 2 and len(list(DASHBOARDS.glob("*.json"))) == 5
    assert len(wanted) > 150

    def all_seen(prometheus: Prometheus) -> bool:
        wanted[:] = [(where, expression) for where, expression in wanted if not prometheus.query(expression)]
        return not wanted

    async with (
        served(2) as app,
        RawClient(app.server.address) as client,
        scraping(app.metrics_url, tmp_path, FACTOR) as prometheus,
        steady_load(client, 6),
    ):
        odd = asyncio.create_task(odd_ends(client))
        await prometheus.until(lambda p: p.query("epserver:latency:ratio"), 150)
        with suppress(TimeoutError):  # what happens now and then may lie outside of a window of a moment
            await prometheus.until(all_seen, 90)
        assert wanted == []
        assert await asyncio.to_thread(prometheus.rule_errors) == []
        assert not odd.done(), odd
        odd.cancel()
        with urllib.request.urlopen(app.metrics_url, timeout=30) as page:
            linted = subprocess.run(["promtool", "check", "metrics"], input=page.read(), check=False)
        assert linted.returncode == 0


def regressions(prometheus: Prometheus) -> set[str]:
    """Operations whose latency regression fires."""
    firing = (alert for alert in prometheus.firing() if alert["alertname"] == "EpServerCommLatencyRegression")
    return {alert["signal"] for alert in firing}


def waited_for_most(matrix: Vector) -> dict[str, str]:
    """Rank -> the peer that it waits for most."""
    rows: dict[str, dict[str, float]] = {}
    for labels, share in matrix.items():
        cell = dict(labels)
        rows.setdefault(cell["rank"], {})[cell["peer"]] = share
    return {rank: max(row, key=row.__getitem__) for rank, row in rows.items()}


def status_page(metrics_url: str) -> str:
    with urllib.request.urlopen(metrics_url.removesuffix("metrics"), timeout=30) as page:
        return str(page.read().decode())


async def test_late_rank_fires_regression_and_wait_matrix_names_it(
    tmp_path: Path,
) -> None:
    (matrix,) = (expression for where, expression in panel_expressions() if "Who waits for whom" in where)
    delayed = "tests.support.observability.delayed_rank"
    async with (
        served(4, delayed) as app,
        RawClient(app.server.address) as client,
        scraping(app.metrics_url, tmp_path, FACTOR) as prometheus,
        steady_load(client, 8),
    ):
        # A past to compare with, at this load; then a moment at which nothing is wrong.
        baseline = 'epserver:latency:ratio{signal="dispatch", stat="mean"}'
        await prometheus.until(lambda p: p.query(baseline), 150)
        await prometheus.until(lambda p: not regressions(p), 60)
        (pid,) = [r.pid for r in (await client.server_info()).rank_info if str(r.rank) == SLOW_RANK]
        os.kill(pid, signal.SIGUSR1)
        await prometheus.until(lambda p: "dispatch" in regressions(p), 120)
        others = {"0": SLOW_RANK, "1": SLOW_RANK, "3": SLOW_RANK}
        await prometheus.until(lambda p: waited_for_most(p.query(matrix)).items() >= others.items(), 30)
        busiest = "topk(1, epserver:comm_peer_wait:relative_5m)"
        ((labels, _),) = (await asyncio.to_thread(prometheus.query, busiest)).items()
        assert dict(labels)["peer"] == SLOW_RANK
        named = f"The others wait for <b>rank {SLOW_RANK}</b>"
        await prometheus.until(lambda _: named in status_page(app.metrics_url), 60)
