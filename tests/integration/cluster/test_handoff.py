"""Hand-offs between two servers of two nodes each: every node's ranks send and fetch. Oracle: no hand-off."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ep_server.client import AsyncClient, Output, PrefillDecode
from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts
from tests.support.cluster.nodes import WAIT, Nodes, nodes
from tests.support.fabric.fabric_ends import needs

NODES, LENGTH = 2, 70
OPTIONS = (
    *("--model-dtype", "float32", "--exchange-reduction", "source", "--scheduler-max-step-tokens", "16"),
    *("--resilience-max-losses", "100", "--exchange-timeout-seconds", "30"),
)
PATIENT = ("--handoff-silence-seconds", "60", "--handoff-stall-seconds", "60")  # with a busy machine
FIELDS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.0}


def prompt(number: int) -> list[int]:
    return [number, *((5 * n + n * n) % 13 for n in range(1, LENGTH))]


async def start_all(made: Nodes, options: Sequence[Sequence[str]] = ((), ())) -> None:
    """options: of each node."""
    everyone = [await made.start(node, *options[node]) for node in range(made.count)]
    for node in everyone:
        await node.serving()


@asynccontextmanager
async def both(hosts: Hosts | None = None, *more: str) -> AsyncIterator[tuple[Nodes, Nodes]]:
    """The nodes of a prefill and of a decode server, whose blocks have other sizes."""
    sides = [(*OPTIONS, *more, "--handoff-role", role) for role in ("prefill", "decode")]
    meet = ["", ""] if hosts is None else [f"{hosts.address(0)}:{port}" for port in (50061, 50062)]
    own = [("--handoff-host", "127.0.0.1" if hosts is None else hosts.address(node)) for node in range(NODES)]
    async with (
        nodes(
            count=NODES, hosts=hosts, options=(*sides[0], "--scheduler-block-size", "8"), rendezvous=meet[0]
        ) as prefill,
        nodes(
            count=NODES, hosts=hosts, options=(*sides[1], "--scheduler-block-size", "4"), rendezvous=meet[1]
        ) as decode,
    ):
        await asyncio.gather(start_all(prefill, own), start_all(decode, own))
        yield prefill, decode


async def handed_off(prefill: Nodes, decode: Nodes) -> dict[str, Any]:
    """Between each two ranks, asked for in the namespace of node 0. Returns: what hand_off.py says."""
    shown = re.search(r"metrics at (\S+)", "\n".join(decode.started[0].lines))
    assert shown is not None
    job = {
        "prefill": prefill.started[0].address,
        "decode": [node.address for node in decode.started],
        "prompts": [prompt(number) for number in range(3)],
        "ranks": NODES,
        "fields": FIELDS,
        "metrics": shown[1],
    }
    inner = await asyncio.create_subprocess_exec(
        *(*decode.prefix(0), sys.executable, "-m", "tests.support.cluster.hand_off"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(2 * WAIT):
        answer, _ = await inner.communicate(json.dumps(job).encode())
    found: dict[str, Any] = json.loads(answer)
    return found


@pytest.mark.parametrize("transport", ["tcp", pytest.param("libfabric", marks=pytest.mark.slow)])
async def test_ranks_of_every_node_send_and_fetch(transport: str) -> None:
    """Node i of either server is in one network namespace: half of the blocks move between these."""
    needs("system")
    if why := namespaces.missing():
        pytest.skip(why)
    with Hosts(NODES) as hosts:
        async with both(hosts, "--handoff-transport", transport, *PATIENT) as (prefill, decode):
            found = await handed_off(prefill, decode)
        assert len(found["pairs"]) == NODES * NODES
        assert found["paths"] == {"shared_memory": 2, transport: 2}
        for number, each in enumerate(found["pairs"]):
            assert each["tokens"] == each["alone"] and len(each["tokens"]) == 24
            assert each["fetched"] == LENGTH - 1
            assert each["address"].startswith(hosts.address(number // NODES) + ":")


async def rounds(ask: PrefillDecode | AsyncClient, over: asyncio.Event) -> list[list[Output]]:
    """Outputs of the same requests, again and again, and once more after `over`."""
    found, last = list[list[Output]](), False
    while not last:
        last = over.is_set()
        streams = []
        for number in range(6):
            stream = ask.generate(prompt(number), bypass_prefix_cache=True, **FIELDS)
            streams.append(await stream if isinstance(ask, PrefillDecode) else stream)
        found.append(list(await asyncio.gather(*(stream.read() for stream in streams))))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_losses_of_ranks_and_nodes_end_no_stream() -> None:
    """On the loopback: a rank of each node is killed, then a node that is not the first of either server."""
    needs("system")
    async with (
        both(None, *PATIENT) as (prefill, decode),
        AsyncClient(decode.started[0].address) as client,
        PrefillDecode(prefill.started[0].address, client, handle_seconds=60.0) as handing,
    ):
        over = asyncio.Event()
        over.set()
        (alone,) = await rounds(client, over)
        over.clear()
        running = asyncio.create_task(rounds(handing, over))
        for server in (prefill, decode):
            for node in server.started:
                await asyncio.sleep(2)
                node.ranks[0].kill()
                await asyncio.sleep(8)
        for server in (prefill, decode):
            server.started[1].signal(signal.SIGKILL)
            await asyncio.sleep(8)
            await (await server.start(1, "--handoff-host", "127.0.0.1")).serving()
        await asyncio.sleep(8)
        over.set()
        found = await running
    for outputs in found:
        assert [each.token_ids for each in outputs] == [each.token_ids for each in alone]
    fetched = [each.finished.usage.cached_tokens for each in found[-1] if each.finished is not None]
    assert fetched == [LENGTH - 1] * 6
