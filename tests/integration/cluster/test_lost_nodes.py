"""Ranks and nodes of a server of several nodes are lost, leave and come back. The oracle: an undisturbed run.

Real processes on the loopback. Streams are opened at node 0 unless a test says otherwise.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.cluster.nodes import Node, Nodes, nodes
from tests.support.fabric.fabric_ends import needs
from tests.support.raw_client import RawClient

WAIT = 120.0
NEW = 300
OPTIONS = (
    *("--model-dtype", "float32", "--exchange-reduction", "source", "--resilience-max-losses", "100"),
    *("--exchange-timeout-seconds", "30"),  # a busy machine must not look like a hang
)
# Everything whose state another rank must build again; prompts of two chunks too.
ASKED: list[dict[str, Any]] = [
    {"prompt": "12+30=", "temperature": 0.0},
    {"prompt": "7+5=" * 40, "temperature": 1.5, "seed": 1},
    {"prompt": "1+2=", "temperature": 1.5, "seed": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"prompt": "3+4=", "temperature": 2.0, "seed": 3, "num_sequences": 2},
    {"prompt": "5+6=", "temperature": 2.0, "seed": 4, "stop_strings": ["77"], "min_new_tokens": 200},
    {"prompt": "9+1=", "temperature": 1.5, "seed": 5, "output_logprobs": True, "top_n": 2},
]


@pytest.fixture(autouse=True)
def network() -> None:
    needs("system")


@dataclass
class Streams:
    """Requests under way, and what came of them, event by event."""

    events: list[list[Any]] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def begun(self, tokens: int = 10) -> None:
        """Until so many messages of each have come."""
        async with asyncio.timeout(WAIT):
            while not all(len(events) > tokens for events in self.events):
                assert not any(task.done() and task.exception() for task in self.tasks)
                await asyncio.sleep(0.005)

    async def outputs(self) -> list[Any]:
        """Per request: token ids of each sequence, text and log probabilities."""
        async with asyncio.timeout(WAIT):
            await asyncio.gather(*self.tasks)
        return [_output(events) for events in self.events]


def _output(events: Sequence[Any]) -> Any:
    found: dict[int, tuple[list[int], list[str], list[Any]]] = {}
    for event in events:
        if event.WhichOneof("event") == "tokens":
            token_ids, text, logprobs = found.setdefault(event.tokens.index, ([], [], []))
            token_ids += event.tokens.token_ids
            text.append(event.tokens.text)
            logprobs += [(one.logprob, [str(each) for each in one.top]) for one in event.tokens.logprobs]
    return {index: (ids, "".join(text), logprobs) for index, (ids, text, logprobs) in found.items()}


def ask(client: RawClient, asked: Sequence[dict[str, Any]] = ASKED, **more: Any) -> Streams:
    streams = Streams()
    for one in asked:
        fields = {"max_new_tokens": NEW, "ignore_eos": True, "timeout": WAIT, **one, **more}
        call, events = client.generate(fields.pop("prompt"), **fields), []
        streams.events.append(events)
        streams.tasks.append(asyncio.create_task(_read(call, events)))
    return streams


async def _read(call: Any, events: list[Any]) -> None:
    async for event in call:
        events.append(event)


@dataclass
class Cluster:
    """Nodes that serve. expected: the outputs of an undisturbed run."""

    made: Nodes
    nodes: list[Node]
    client: RawClient
    expected: list[Any]

    async def live(self, nodes: int) -> None:
        """Until so many nodes serve."""
        async with asyncio.timeout(WAIT):
            while (await self.client.server_info()).live_nodes != nodes:
                await asyncio.sleep(0.01)

    async def back(self, node: int) -> None:
        """Starts a node again, until all nodes serve."""
        self.nodes[node] = await self.made.start(node, *OPTIONS)
        await self.nodes[node].serving(WAIT)
        await self.live(len(self.nodes))

    def times(self, pattern: str) -> int:
        """How often node 0 said so."""
        return sum(pattern in line for line in self.nodes[0].lines)

    async def until(self, condition: Callable[[], bool]) -> None:
        await self.nodes[0].until(condition, WAIT)

    async def idle(self) -> None:
        """No request and no KV block is left."""
        async with asyncio.timeout(WAIT):
            while (await self.client.loads()).in_flight:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def cluster(count: int = 2, *options: str, **values: Any) -> AsyncIterator[Cluster]:
    async with nodes(count=count, options=(*OPTIONS, *options), **values) as made:
        everyone = [await made.start(node) for node in range(count)]
        for node in everyone:
            await node.serving(WAIT)
        async with RawClient(everyone[0].address) as client:
            expected = await ask(client).outputs()
            yield Cluster(made, everyone, client, expected)


async def test_streams_outlive_a_node_that_returns_and_leaves() -> None:
    async with cluster() as served:
        streams = ask(served.client)
        await streams.begun()
        served.nodes[1].signal(signal.SIGKILL)
        assert await streams.outputs() == served.expected
        await served.live(1)
        streams = ask(served.client)
        await streams.begun()
        await served.back(1)
        assert await streams.outputs() == served.expected
        streams = ask(served.client, max_new_tokens=NEW)
        await streams.begun()
        served.nodes[1].signal(signal.SIGTERM)
        assert await streams.outputs() == served.expected
        assert await served.nodes[1].end() == 0
        assert await ask(served.client).outputs() == served.expected
        assert served.nodes[0].inner.returncode is None
