"""A real gRPC server on a free port, in this process, over FakeRanks. Checked for leftovers when it stops."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc import aio

from ep_server.client import Target
from ep_server.config import Config
from ep_server.engine.observer import NullObserver, RecoveryPhase, RequestSummary
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.records import LossCause, Sampling
from ep_server.testing.fake_ranks import FakeRanks
from tests.support import tokenizers as made
from tests.support.raw_client import RawClient

WAIT = 30.0  # seconds after which a test has failed
MODEL = ServedModel(
    name="fake",
    vocab_size=257,
    max_context=65536,
    eos_token_ids=frozenset({made.EOS}),
    defaults=Sampling(temperature=0.5, top_k=40),
    tokenizer=made.loaded(made.byte_level()),
    architecture="fake_moe",
    num_experts=8,
    experts_per_token=2,
)
NO_TOKENIZER = dataclasses.replace(MODEL, tokenizer=None)


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """Messages from this level on, without those of gRPC about event loops of earlier tests."""
    records = [each for each in caplog.records if each.levelno >= level]
    return [each.getMessage() for each in records if "Event loop is closed" not in str(each.exc_info)]


@dataclass
class Recorder(NullObserver):
    """An observer that keeps what it heard."""

    finished: list[RequestSummary] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    accept_waits: list[float] = field(default_factory=list)
    freed: list[float] = field(default_factory=list)
    first_tokens: int = 0
    gaps: int = 0
    admitted: int = 0
    load: tuple[int, int] = (0, 0)
    unread: int = 0
    unread_ended: int = 0
    lost: list[int] = field(default_factory=list)
    recovered: list[int] = field(default_factory=list)
    phases: dict[RecoveryPhase, list[float]] = field(default_factory=dict)

    def on_finished(self, summary: RequestSummary) -> None:
        self.finished.append(summary)

    def on_accept_wait(self, seconds: float) -> None:
        self.accept_waits.append(seconds)

    def on_refused(self, status: str) -> None:
        self.refused.append(status)

    def on_freed(self, seconds: float) -> None:
        self.freed.append(seconds)

    def on_first_token(self, seconds: float) -> None:
        self.first_tokens += 1

    def on_token_gap(self, seconds: float) -> None:
        self.gaps += 1

    def on_admitted(self, prompt_tokens: int) -> None:
        self.admitted += 1

    def on_load(self, running: int, waiting: int, unread: int) -> None:
        self.load = (running, waiting)
        self.unread = unread

    def on_unread_ended(self) -> None:
        self.unread_ended += 1

    def on_recovered(self, seconds: float, requests: int) -> None:
        self.recovered.append(requests)

    def on_recovery_phase(self, phase: RecoveryPhase, seconds: float) -> None:
        self.phases.setdefault(phase, []).append(seconds)

    def on_rank_lost(self, rank: int, cause: LossCause) -> None:
        self.lost.append(rank)


@dataclass
class Served:
    """A server in its serving state and a client of it."""

    server: Server
    ranks: FakeRanks
    client: RawClient
    heard: Recorder
    started: list[tuple[int, str, int, int]]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Lets the event loop run until the condition holds."""
        async with asyncio.timeout(WAIT):
            while not condition():
                await asyncio.sleep(0)

    def forget(self) -> None:
        """Drops what the fakes keep of requests that have ended. The server is idle."""
        assert len(self.heard.finished) == self.heard.admitted
        vars(self.heard).update(vars(Recorder()))
        for kept in (self.ranks.requests, self.ranks._drawn, self.ranks.cancelled):
            kept.clear()

    async def idle(self) -> None:
        """Until no request is left anywhere."""
        await self.until(lambda: not self.server.engine.statistics().in_flight)


@asynccontextmanager
async def serving(
    ranks: FakeRanks | None = None, model: ServedModel = MODEL, target: Target | None = None, **values: Any
) -> AsyncIterator[Served]:
    """values: fields of the configuration, section__field."""
    ranks = ranks or FakeRanks()
    dotted = {name.replace("__", "."): value for name, value in values.items()}
    base = {"grpc.port": 0, "grpc.drain_seconds": 0.0, "resilience.on_rank_loss": "stop"}
    config = Config.from_values({**base, **dotted})
    heard, started = Recorder(), []
    server = Server(config, model, ranks, heard)
    await server.start(lambda *progress: started.append(progress))
    client = RawClient(dataclasses.replace(target or Target(""), address=server.address))
    served = Served(server, ranks, client, heard, started)
    try:
        yield served
        server.engine.check_integrity()
    finally:
        await client.close()
        ranks.release()
        await server.drain()
        await server.stop()
    server.engine.check_integrity()
    ranks.check_integrity()
    assert server.engine.statistics().open_streams == 0
    assert len(heard.finished) == heard.admitted


async def parked(server: Server) -> None:
    """Until the newest report of every rank says that it has done all that was submitted."""
    engine = server.engine
    async with asyncio.timeout(WAIT):
        while True:
            found = [each.counters.get("parked_at_work") for each in engine.rank_statistics.values()]
            if found == [engine.statistics().submitted] * engine.num_ranks:
                return
            await asyncio.sleep(0.01)


async def failure(call: Any) -> aio.AioRpcError:
    """The error that a call ends with."""
    try:
        async with asyncio.timeout(WAIT):
            await (rest(call) if hasattr(call, "read") else call)
    except aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended with OK")


async def next_event(call: Any) -> Any:
    """The next message of a stream."""
    async with asyncio.timeout(WAIT):
        event = await call.read()
    assert event is not aio.EOF
    return event


async def rest(call: Any) -> list[Any]:
    """All further messages of a stream."""
    events = []
    while (event := await call.read()) is not aio.EOF:
        events.append(event)
    return events


def trailers(error: aio.AioRpcError) -> dict[str, str]:
    return {key: str(value) for key, value in error.trailing_metadata() or ()}


Code = grpc.StatusCode
