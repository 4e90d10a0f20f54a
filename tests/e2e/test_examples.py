"""Every example runs as examples/README.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ep_server import _C
from ep_server.client import Client
from ep_server.errors import EpServerError
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "README.md").read_text()
COMMANDS = dict(re.findall(r"^\| \[(\w+)\.py\].*`(.*)` \|$", PAGE, re.MULTILINE))
SECONDS = 120.0
NO_STANDBY = {"EP_SERVER_RESILIENCE__STANDBY": "0"}  # no rank is lost here, and each process imports torch


def run(name: str, *arguments: str) -> list[str]:
    """Runs the command of the page, with more arguments. Returns: lines of its standard output."""
    python = Path(sys.executable).parent
    environ = os.environ | NO_STANDBY | {"PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    if "PYTHONPATH=" not in COMMANDS[name]:
        environ["PYTHONPATH"] = str(ROOT)
    command = COMMANDS[name].replace("PYTHONPATH=", f"PYTHONPATH={ROOT}:")
    done = subprocess.run(
        ["bash", "-c", f'{command} "$@"', name, *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def serving(client: Client) -> bool:
    try:
        return client.serving(timeout=1.0)
    except EpServerError:
        return False


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The server that the page starts, on a free port. Yields: its address."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    (command,) = re.findall(r"^ep-server (serve .*)$", PAGE, re.MULTILINE)
    line = [sys.executable, "-m", "ep_server", *command.split(), f"--port={port}", "--metrics-port=0"]
    process = subprocess.Popen(line, cwd=ROOT, env=os.environ | NO_STANDBY)
    try:
        with Client(address) as client:
            end = time.monotonic() + SECONDS
            while not serving(client):
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/how-to/clients.md"])
def test_python_of_the_page_runs(server: str, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its blocks run in order, as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block.replace("127.0.0.1:50051", server), page, "exec"), names)
    assert "42" in capsys.readouterr().out.split()
    for name in ("client", "patient", "strict"):
        if name in names:
            names[name].close()


def test_page_lists_every_example() -> None:
    assert set(COMMANDS) == {path.stem for path in (ROOT / "examples").glob("*.py")}


def test_stream(server: str) -> None:
    assert "".join(run("stream", "--address", server)).strip() == "42"


def test_structured_output(server: str) -> None:
    (number,) = run("structured_output", "--address", server, "--json-schema", '{"type": "integer"}')
    assert number.lstrip("-").isdigit()
    assert run("structured_output", "--address", server, "--choice", "042", "--choice", "42") in (
        ["042"],
        ["42"],
    )


def test_deep_ep_buffer() -> None:
    lines = sorted(run("deep_ep_buffer"))
    modes = ("high throughput", "low latency")
    heads = [f"rank {rank}: {mode}" for rank in range(2) for mode in modes]
    assert [line.rpartition(":")[0] for line in lines] == heads
    assert all(line.endswith("tokens correctly") for line in lines)


@pytest.mark.skipif(not _C.FABRIC, reason="needs the headers of libfabric")
def test_two_nodes() -> None:
    answers = [line.partition(": ")[2] for line in run("two_nodes")]
    assert answers == ["4 ranks, 12 + 30 = 42"] * 2


def test_benchmark(server: str) -> None:
    heading, row = run("benchmark", "--address", server, "--requests=4", "--concurrency", "4")
    assert heading.split()[:2] == ["streams", "tokens/s"]
    streams, *figures = map(float, row.replace("ms", "").replace(",", "").split())
    assert streams == 4 and len(figures) == 5 and min(figures) > 0
