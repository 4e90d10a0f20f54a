"""A rank of a real server is killed and the server started again: no scrape sees it, an alert tells of it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ep_server.cli.demo.run import DEMO_MODEL
from tests.support.observability.prometheus import Prometheus, scraping
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus"),
]
FACTOR = 10  # scrapes every 3 s, many times as long as a server takes to end


@contextmanager
def serving(metrics_port: int) -> Iterator[subprocess.Popen[bytes]]:
    flags = [f"--model={DEMO_MODEL}", "--ranks=2", "--scheduler-kv-blocks=64", f"--port={free_port()}"]
    flags += ["--resilience-on-rank-loss=stop"]
    line = [sys.executable, "-m", "ep_server", "serve", *flags, f"--metrics-port={metrics_port}"]
    process = subprocess.Popen(line, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def alerts(prometheus: Prometheus) -> set[str]:
    return {alert["alertname"] for alert in prometheus.firing()}


async def test_a_lost_rank_between_two_scrapes_is_told_of(tmp_path: Path) -> None:
    port = free_port()
    async with scraping(f"http://127.0.0.1:{port}/metrics", tmp_path, FACTOR) as prometheus:
        both_up = "sum(epserver_ep_rank_up) == 2"
        with serving(port) as first:
            await prometheus.until(lambda p: p.query(both_up), 60)
            assert "EpServerRestarted" not in await asyncio.to_thread(alerts, prometheus)
            ranks = [each for each in psutil.Process(first.pid).children() if "--rank" in each.cmdline()]
            ranks[-1].kill()
            assert await asyncio.to_thread(first.wait, 60) == 1
        with serving(port):
            await prometheus.until(lambda p: "EpServerRestarted" in alerts(p), 90)
