"""The status page in headless Chromium: it renews itself, and fits phones and the dark."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from ep_server.config import MetricsConfig
from ep_server.observability.metrics_endpoint import MetricsEndpoint
from ep_server.observability.status_history import Snapshot
from ep_server.observability.status_page import StatusPage
from tests.support.observability.reports import snapshot

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
LIGHT, DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"

Browser = Callable[..., str]


class Page(StatusPage):
    """A page that looks once before each answer. change: of its HTML, before it is sent."""

    def __init__(self, change: Callable[[str], str] = lambda html: html) -> None:
        self.served, self._change = 0, change
        super().__init__(self._now, "demo_model", "1.2.3")

    def html(self) -> str:
        self.served += 1
        self.look()
        return self._change(super().html())

    def _now(self) -> Snapshot:
        taken = snapshot(10.0 + 2 * self.served, 100 + 50 * self.served)
        return Snapshot(**{name: getattr(taken, name) for name in taken.__slots__} | {"running": self.served})


@contextmanager
def served(page: Page) -> Iterator[str]:
    endpoint = MetricsEndpoint(MetricsConfig(port=0), CollectorRegistry(), page)
    try:
        yield endpoint.url.removesuffix("metrics")
    finally:
        endpoint.close()


@pytest.fixture
def browse(tmp_path: Path) -> Browser:
    def run(url: str, *flags: str) -> str:
        line = [CHROMIUM or "", *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, url]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    return run


def test_it_renews_itself(browse: Browser) -> None:
    page = Page()
    with served(page) as url:
        shown = browse(url, "--virtual-time-budget=9000", "--dump-dom")
    running = re.search(r"<dt>running</dt><dd>(\d+)</dd>", shown)
    assert running is not None and 2 <= int(running[1]) <= page.served
    assert len(re.findall("<main>", shown)) == 1 and '<p id="lost" role="alert" hidden' in shown


def test_a_server_that_is_gone_is_said_so(browse: Browser) -> None:
    first = Page()

    def once(html: str) -> str:
        return html if first.served == 1 else ""

    first._change = once
    with served(first) as url:
        shown = browse(url, "--virtual-time-budget=5000", "--dump-dom")
    assert '<p id="lost" role="alert">' in shown
    assert "<dt>running</dt><dd>1</dd>" in shown  # what was last known stays


@dataclass(frozen=True)
class Frame:
    """The page in a window of its own inside a file: as narrow as a phone."""

    folder: Path
    html: str

    def url(self, width: int) -> str:
        sandbox = "allow-same-origin allow-scripts"
        style = f"border:0;width:{width}px;height:1300px"
        frame = f'<iframe sandbox="{sandbox}" style="{style}" srcdoc="{escape(self.html)}"></iframe>'
        file = self.folder / "frame.html"
        file.write_text(f'<meta name="color-scheme" content="light dark"><title>-</title>{frame}')
        return file.as_uri()


MEASURE = """<script>
const of = (where) => getComputedStyle(document.querySelector(where));
const right = document.querySelector(".ranks").getBoundingClientRect().right;
parent.document.title = [document.documentElement.scrollWidth, innerWidth, Math.round(right),
  of("body").backgroundColor, of("h1").color].join("|");
</script></body>"""


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_it_fits_its_window_in_light_and_dark(browse: Browser, tmp_path: Path, width: int) -> None:
    frame = Frame(tmp_path, Page().html().replace("</body>", MEASURE))
    brightness = {}
    for scheme in (LIGHT, DARK):
        shown = browse(frame.url(width), scheme, "--virtual-time-budget=500", "--dump-dom")
        needed, inner, right, *colors = re.findall("<title>(.*)</title>", shown)[0].split("|")
        assert int(needed) <= int(inner) == width and int(right) <= width
        brightness[scheme] = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]
    (light_page, dark_ink), (dark_page, light_ink) = brightness[LIGHT], brightness[DARK]
    assert dark_ink < 200 and light_page > 600
    assert dark_page < 200 and light_ink > 600
