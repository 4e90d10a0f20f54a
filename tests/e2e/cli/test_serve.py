"""`ep-server serve` as an operator runs it: a process, two rank processes, the demo model, real signals."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc.aio import AioRpcError
from grpc_health.v1 import health_pb2

import ep_server
from ep_server.client import Target
from ep_server.frontend import endpoint
from tests.support.frontend import Code, failure, next_event, rest
from tests.support.raw_client import RawClient

MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"
WAIT = 120.0  # seconds; the machine may be busy with much else
NO_STANDBY = ("--resilience-standby", "0")  # where no process is replaced: each imports torch


@dataclass
class Process:
    """A running server. lines: of its log, JSON objects."""

    inner: asyncio.subprocess.Process
    lines: list[dict[str, str]] = field(default_factory=list)
    address: str = ""

    @property
    def ranks(self) -> list[psutil.Process]:
        """Without those on standby, whose rank is -1."""
        lines = {child: child.cmdline() for child in psutil.Process(self.inner.pid).children()}
        return [child for child, line in lines.items() if "ranks.life" in str(line) and "-1" not in line]

    async def read_log(self) -> None:
        """Until the address is known, or the process ends."""
        assert self.inner.stderr is not None
        while not self.address and (line := await self.inner.stderr.readline()):
            self.lines.append(json.loads(line))
            if match := re.match(r"serving \S+ on (\S+), ", self.lines[-1]["message"]):
                self.address = match[1]

    async def end(self) -> tuple[int, str]:
        """Exit code and the rest of standard error."""
        async with asyncio.timeout(WAIT):
            _, err = await self.inner.communicate()
        assert self.inner.returncode is not None
        return self.inner.returncode, err.decode()


@asynccontextmanager
async def launched(*arguments: str, model: Path = MODEL) -> AsyncIterator[Process]:
    inner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ep_server", "serve", "--model", str(model), "--ranks", "2"),
        *("--metrics-port", "0", "--log-format", "json", "--parallel-threads-per-rank", "1", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    process = Process(inner)
    try:
        yield process
    finally:
        if inner.returncode is None:
            inner.kill()
            await inner.communicate()


@asynccontextmanager
async def served(*arguments: str) -> AsyncIterator[tuple[Process, RawClient]]:
    async with launched("--port", "0", *arguments) as process:
        async with asyncio.timeout(WAIT):
            await process.read_log()
        assert process.address, process.lines
        async with RawClient(process.address) as client:
            yield process, client


async def test_serve_answer_cancel_drain() -> None:
    async with served(*NO_STANDBY) as (process, client):
        assert process.lines[-1]["message"].endswith(f" on {process.address}, 2 ranks on cpu")
        answer = await client.complete("12+30=", temperature=0.0, timeout=WAIT)
        assert answer.text.split() == ["42"]
        again = await client.complete(
            "12+30=", temperature=0.0, output_logprobs=True, top_n=3, dp_rank=1, timeout=WAIT
        )
        assert again.token_ids == answer.token_ids and again.info.rank == 1
        for token, entry in zip(again.token_ids, again.logprobs, strict=True):
            assert entry.top[0].token_id == token and entry.top[0].logprob == entry.logprob <= 0
            assert len(entry.top) == 3
        info = await client.server_info()
        assert {rank.pid for rank in info.rank_info} == {rank.pid for rank in process.ranks}

        _, long, rank = await amid(client, ignore_eos=True, request_id="long", timeout=WAIT)
        await client.abort("long")
        rank.resume()
        assert (await failure(long)).code() is Code.CANCELLED
        async with asyncio.timeout(WAIT):
            while (await client.loads()).in_flight:
                pass
        state = await client.ep_state()
        assert [rank.up for rank in state.ranks] == [True, True]

        last = client.generate("12+30=", ignore_eos=True, max_new_tokens=200, timeout=WAIT)
        await next_event(last)
        process.inner.send_signal(signal.SIGTERM)
        assert (await rest(last))[-1].finished.usage.output_tokens == 200
        code, _ = await process.end()
        assert code == 0


async def amid(client: RawClient, **fields: Any) -> tuple[list[Any], Any, psutil.Process]:
    """A stream that has more to come.

    Returns: the events that were read, the call, the stream's rank, which is stopped.
    """
    rank = psutil.Process(next(one.pid for one in (await client.server_info()).rank_info if one.rank == 0))
    async with asyncio.timeout(WAIT):
        while True:
            call = client.generate("1+1=", dp_rank=0, **fields)
            events = [await next_event(call) for _ in range(2)]
            rank.suspend()
            for _ in range(2):  # by the second answer, the server has read all that the rank had sent
                loads = await client.loads()
            if loads.in_flight:
                return events, call, rank
            rank.resume()


async def test_a_killed_rank_is_replaced_and_its_stream_continues() -> None:
    async with served("--exchange-reduction", "source") as (process, client):
        fields = {"seed": 1, "max_new_tokens": 400, "ignore_eos": True, "timeout": WAIT}
        undisturbed = await client.complete("1+1=", **fields)
        events, call, rank = await amid(client, **fields)
        rank.kill()
        events += await rest(call)
        tokens = [token for event in events for token in event.tokens.token_ids]
        assert tokens == undisturbed.token_ids
        process.inner.send_signal(signal.SIGTERM)
        code, log = await process.end()
        assert code == 0 and "was lost: killed by SIGKILL" in log and "1 requests continue" in log


async def test_a_killed_rank_ends_everything_if_told_to() -> None:
    async with served("--resilience-on-rank-loss", "stop") as (process, client):
        ranks = process.ranks
        _, call, rank = await amid(client, ignore_eos=True, timeout=WAIT)
        rank.kill()
        error = await failure(call)
        assert error.code() is Code.UNAVAILABLE and "was lost: killed by SIGKILL" in error.details()
        code, log = await process.end()
        assert code == 1 and "was lost: killed by SIGKILL" in log
        assert [rank for rank in ranks if rank.is_running() and rank.status() != "zombie"] == []


async def test_a_port_in_use_is_one_line_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        async with launched("--port", str(other.getsockname()[1])) as process:
            code, err = await process.end()
    assert code == 1
    assert re.fullmatch(r"ep-server: error: grpc\.port = \d+: must be .*in use\)\n", err)


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
async def test_a_worker_that_cannot_start_says_why_in_one_line(missing: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / missing).unlink()
    async with launched("--port", "0", model=model) as process:
        code, err = await process.end()
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("ep-server: error: ") and missing in last, err
    assert "Traceback" not in err


async def end(call: Any) -> Code:
    with suppress(AioRpcError):
        async with asyncio.timeout(WAIT):
            await rest(call)
    return await call.code()


async def test_callers_of_a_stopped_server_are_told() -> None:
    async with served(*NO_STANDBY) as (process, _):
        # The second time is for a stream that ended before the signal, or a server that was held up.
        for seconds in (1.0, 10.0):
            target = Target(process.address, keepalive_seconds=1.0, keepalive_timeout_seconds=seconds)
            async with RawClient(target) as client:
                watch = client.health.Watch(health_pb2.HealthCheckRequest())  # silent
                fields = {"ignore_eos": True, "max_new_tokens": 2000}
                stream = client.generate("12+30=", **fields)  # with data on its way
                with suppress(AioRpcError):
                    for call in (watch, stream, stream):
                        await next_event(call)
                process.inner.send_signal(signal.SIGSTOP)
                ends = [await end(call) for call in (watch, stream)]
            process.inner.send_signal(signal.SIGCONT)
            if ends == [Code.UNAVAILABLE] * 2:
                break
        assert ends == [Code.UNAVAILABLE] * 2


def test_a_server_takes_the_pings_of_a_client() -> None:
    assert dict(Target("").options)["grpc.keepalive_time_ms"] > endpoint.LEAST_PING_MS
    assert "grpc.keepalive_time_ms" not in dict(Target("", keepalive_seconds=0.0).options)
