"""The prefill server is killed and started again under load: every stream is that of a single server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ep_server.cli.main import main
from ep_server.client import AsyncClient, Output, PrefillDecode
from tests.support.handoff.servers import MODEL, serving
from tests.support.ports import free_port
from tests.support.ranks.zygote import Forked, forking, start_server

WAIT = 240.0
STREAMS = 6
HANDED_OFF = 89  # tokens of a prompt: all but the last
FIELDS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "bypass_prefix_cache": True}


@pytest.fixture(scope="module", autouse=True)
def _ranks_are_forks() -> Iterator[None]:
    """Servers and ranks are lost and started all the time."""
    with forking():
        yield


def prompt(number: int) -> list[int]:
    return [number, *((5 * n + n * n) % 13 for n in range(1, 90))]


class PrefillServer:
    """`ep-server serve` with two ranks, on one port for all of its processes. It and its ranks are forks."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._log = folder / "prefill.log"
        self._process: Forked | subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        port = self.address.rpartition(":")[2]
        line = ["serve", "--model", str(MODEL), "--port", port, "--ranks", "2", "--metrics-port", "0"]
        line += ["--handoff-role", "prefill", "--model-dtype", "float32", "--exchange-reduction", "source"]
        line += ["--scheduler-max-step-tokens", "16", "--handoff-hold-seconds", "5"]
        line += ["--resilience-max-losses", "100"]
        with self._log.open("wb") as output:
            self._process = start_server(line, output.fileno())
        async with asyncio.timeout(WAIT):
            while not re.search(r"serving \S+ on ", self._log.read_text()):
                assert self._process.poll() is None, self._log.read_text()[-2000:]
                await asyncio.sleep(0.05)

    async def supervise(self) -> None:
        """Starts it again whenever it has ended."""
        while True:
            if self._process is None or self._process.poll() is not None:
                await self.start()
            await asyncio.sleep(0.1)

    def signal(self, number: int) -> None:
        """To all of its processes."""
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """Its ranks die with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@asynccontextmanager
async def load(decode: AsyncClient, prefill: PrefillServer, found: list[list[Output]]) -> AsyncIterator[None]:
    """Rounds of streams, appended to `found`, until the block has ended and all of a round were handed off.

    A server that returns is used once gRPC connects to it again, up to five seconds later.
    """
    over = False

    async def rounds() -> None:
        handed_off = False
        async with PrefillDecode(prefill.address, decode, handle_seconds=60.0) as pair:
            while not (over and handed_off):
                streams = [await pair.generate(prompt(n), seed=n, **FIELDS) for n in range(STREAMS)]
                found.append(list(await asyncio.gather(*(stream.read() for stream in streams))))
                usages = [each.finished.usage for each in found[-1] if each.finished is not None]
                handed_off = [usage.cached_tokens for usage in usages] == [HANDED_OFF] * STREAMS

    task = asyncio.create_task(rounds())
    try:
        yield
    finally:
        over = True
        await task


async def test_nothing_waits_for_a_prefill_server_that_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not return: a wait for it would take ten minutes. Rank 0 of the decode server is lost too.

    One request finds out, and one line says so.
    """
    prefill, patient = PrefillServer(tmp_path), dict.fromkeys(("silence_seconds", "timeout_seconds"), 600.0)
    options = {f"handoff__{name}": seconds for name, seconds in patient.items()}
    async with (
        asyncio.timeout(WAIT),
        serving("decode", parallel__ranks=2, exchange__reduction="source", **options) as decode,
        AsyncClient(decode.server.address) as client,
    ):
        alone = [await client.complete(prompt(n), seed=n, **FIELDS) for n in range(STREAMS)]
        await prefill.start()
        async with PrefillDecode(prefill.address, client, handle_seconds=600.0) as pair:
            streams = [await pair.generate(prompt(n), seed=n, **FIELDS) for n in range(STREAMS)]
            prefill.kill()  # while blocks move
            os.kill(decode.ranks.pids[0], signal.SIGKILL)
            later = [await pair.generate(prompt(n), seed=n, **FIELDS) for n in range(STREAMS)]
            outputs = await asyncio.gather(*(stream.read() for stream in streams + later))
    assert caplog.text.count("the decode server computes the prompt") == 1
    assert [each.token_ids for each in outputs] == [each.token_ids for each in alone] * 2
    assert all(each.finished and not each.finished.usage.cached_tokens for each in outputs[STREAMS:])


async def test_one_request_waits_for_a_hung_prefill_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of its processes are stopped. It is used again when they go on."""
    prefill = PrefillServer(tmp_path)
    async with (
        asyncio.timeout(WAIT),
        serving("decode") as decode,
        AsyncClient(decode.server.address) as client,
    ):
        alone = [await client.complete(prompt(n), seed=n, **FIELDS) for n in range(STREAMS)]
        await prefill.start()
        try:
            async with PrefillDecode(prefill.address, client, handle_seconds=2.0) as pair:
                cached = 0
                while not cached:  # again if a busy machine looked like a hung server
                    warm = await (await pair.generate(prompt(0), seed=0, **FIELDS)).read()
                    cached = warm.finished.usage.cached_tokens if warm.finished else 0
                caplog.clear()
                prefill.signal(signal.SIGSTOP)
                streams = [await pair.generate(prompt(n), seed=n, **FIELDS) for n in range(STREAMS)]
                outputs = [await stream.read() for stream in streams]
                assert caplog.text.count("the decode server computes the prompt") == 1
                prefill.signal(signal.SIGCONT)
                again = outputs[0]
                while again.finished is None or not again.finished.usage.cached_tokens:
                    again = await (await pair.generate(prompt(1), seed=1, **FIELDS)).read()
        finally:
            prefill.kill()
    assert [each.token_ids for each in outputs] == [each.token_ids for each in alone]
    assert again.token_ids == alone[1].token_ids


async def losses(folder: Path, count: int) -> None:
    prefill, found = PrefillServer(folder), list[list[Output]]()
    options = {"exchange__reduction": "source", "handoff__silence_seconds": 60.0}
    async with (
        serving("decode", parallel__ranks=2, **options) as decode,
        AsyncClient(decode.server.address) as client,
    ):
        alone = [await client.complete(prompt(n), seed=n, **FIELDS) for n in range(STREAMS)]
        await prefill.start()
        try:
            async with load(client, prefill, found):
                for _ in range(count):
                    await asyncio.sleep(0.3)
                    prefill.kill()
                    await asyncio.sleep(0.3)
                    await prefill.start()
        finally:
            prefill.kill()
    for outputs in found:
        assert [each.token_ids for each in outputs] == [each.token_ids for each in alone]


@pytest.mark.long
async def test_a_killed_prefill_server_ends_no_stream(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT):
        await losses(tmp_path, 2)


async def test_chaos_kills_the_prefill_server_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Beside a rank of either side."""
    prefill = PrefillServer(tmp_path)
    await prefill.start()
    supervisor = asyncio.create_task(prefill.supervise())
    try:
        async with serving("decode", parallel__ranks=2, exchange__reduction="source") as decode:
            line = ["chaos", "--json", "--address", decode.server.address, "--prefill", prefill.address]
            line += ["--faults", "3", "--kind", "kill", "--kind", "server", "--every", "1"]
            line += ["--streams", "6", "--prompt-tokens", "20", "90", "--max-new-tokens", "60"]
            async with asyncio.timeout(WAIT):
                assert await asyncio.to_thread(main, line) == 0, capfd.readouterr()
    finally:
        supervisor.cancel()
        prefill.kill()
    report = json.loads(capfd.readouterr().out)
    faults = {kind: count for kind, count in report["faults"].items() if count}
    assert report["good"] and report["exact"] and faults == {"kill": 2, "server": 1}
    assert report["same_tokens"] == report["streams"] and report["handed_off"]
    assert set(report["first_token_seconds"]) == {"undisturbed", "losses"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_prefill_server_killed_often_ends_no_stream(tmp_path: Path) -> None:
    await losses(tmp_path, 200)
