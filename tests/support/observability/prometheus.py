"""A real Prometheus on a free port, with the chart's rules, that scrapes one server; and its query API."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.observability.files import faster

LABELS = {"namespace": "models", "job": "demo"}
Vector = dict[frozenset[tuple[str, str]], float]


@dataclass(frozen=True)
class Prometheus:
    """A running one."""

    url: str

    def query(self, expression: str) -> Vector:
        """Label set -> value now, NaN left out. Raises: AssertionError for an expression that fails."""
        answer = self._get("query", query=expression)
        assert answer["resultType"] == "vector", expression
        values = {frozenset(each["metric"].items()): float(each["value"][1]) for each in answer["result"]}
        return {labels: value for labels, value in values.items() if not math.isnan(value)}

    def firing(self) -> list[dict[str, str]]:
        """Labels of the alerts that fire."""
        return [each["labels"] for each in self._get("alerts")["alerts"] if each["state"] == "firing"]

    def rule_errors(self) -> list[str]:
        """What went wrong in evaluating rules."""
        groups = self._get("rules")["groups"]
        return [
            f"{rule['name']}: {rule['lastError']}"
            for g in groups
            for rule in g["rules"]
            if "lastError" in rule
        ]

    async def until(self, holds: Callable[[Prometheus], Any], seconds: float) -> Any:
        """The first true answer of `holds`. Raises: TimeoutError."""
        async with asyncio.timeout(seconds):
            while not (answer := await asyncio.to_thread(holds, self)):
                await asyncio.sleep(0.5)
        return answer

    def _get(self, path: str, **arguments: str) -> dict[str, Any]:
        text = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(text, timeout=30) as page:
                data: dict[str, Any] = json.load(page)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error
        return data


@asynccontextmanager
async def scraping(metrics_url: str, folder: Path, factor: int) -> AsyncIterator[Prometheus]:
    """Prometheus with the rules `factor` times faster, and a scrape interval of 30 s made faster alike."""
    target = urllib.parse.urlparse(metrics_url).netloc
    interval = f"{30_000 // factor}ms"
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {"job_name": "demo", "static_configs": [{"targets": [target], "labels": {"namespace": "models"}}]}
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": faster(factor)}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    line += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        await _ready(prometheus, process)
        yield prometheus
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 30)


async def _ready(prometheus: Prometheus, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(60):
        while True:
            assert process.poll() is None, "prometheus ended"
            try:
                (await asyncio.to_thread(urllib.request.urlopen, f"{prometheus.url}/-/ready")).close()
            except OSError:  # nobody listens yet, or 503
                await asyncio.sleep(0.2)
            else:
                return
