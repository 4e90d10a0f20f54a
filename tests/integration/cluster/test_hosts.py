"""Two network namespaces of two ranks each as one server: the tokens of one host, whatever node is asked."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts
from tests.support.cluster.asking import asked
from tests.support.cluster.nodes import WAIT, Nodes, left, nodes
from tests.support.fabric.fabric_ends import needs
from tests.support.models.checkpoints import CASES, Case
from tests.support.models.fixtures import checkpoint

FAMILIES = {case.name.partition("-")[0]: case for case in reversed(CASES)}  # the first case of each
IN_CI = "mixtral"
RANKS = 2  # of each node


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    needs("system")
    if why := namespaces.missing():
        pytest.skip(why)
    with Hosts(2) as made:
        yield made


async def ask(made: Nodes, node: int, requests: list[dict[str, Any]]) -> list[tuple[list[int], int, str]]:
    async with asked(made, node, requests) as running:
        return await running.answers()


async def start_all(made: Nodes) -> None:
    everyone = [await made.start(node) for node in range(made.count)]
    for node in everyone:
        await node.serving()


async def stop_all(made: Nodes) -> None:
    made.started[0].signal(signal.SIGTERM)
    assert [await node.end() for node in made.started] == [0] * made.count


async def test_every_node_gives_the_tokens_of_one_host(hosts: Hosts) -> None:
    """On every rank from either node, and where the scheduler puts it: beside the node that was asked."""
    sums = [f"{n}+{7 * n + 3}=" for n in (4, 17, 30, 55)]
    greedy = [{"prompt": text, "temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True} for text in sums]
    async with nodes(count=1, ranks=1) as alone:
        single = await alone.start(0)
        await single.serving()
        expected = [tokens for tokens, _, end in await ask(alone, 0, greedy) if end == "OK"]
    assert len(expected) == len(sums)
    async with nodes(ranks=RANKS, hosts=hosts) as made:
        await start_all(made)
        for node in range(2):
            everywhere = [fields | {"dp_rank": rank} for rank in range(2 * RANKS) for fields in greedy]
            got = await ask(made, node, everywhere)
            assert [(tokens, end) for tokens, _, end in got] == [
                (e, "OK") for _ in range(4) for e in expected
            ]
            assert [rank for _, rank, _ in got] == [fields["dp_rank"] for fields in everywhere]
            ((tokens, rank, end),) = await ask(made, node, greedy[:1])
            assert (tokens, end) == (expected[0], "OK")
            assert rank // RANKS == node
        await stop_all(made)


@pytest.mark.parametrize(
    "case",
    [pytest.param(FAMILIES[name], marks=() if name == IN_CI else pytest.mark.slow) for name in FAMILIES],
    ids=FAMILIES,
)
async def test_every_family_gives_transformers_tokens(case: Case, hosts: Hosts) -> None:
    tiny = checkpoint(case)
    options = ("--model-dtype", "float32", "--scheduler-max-step-tokens", "32", "--scheduler-block-size", "4")
    async with nodes(ranks=RANKS, hosts=hosts, model=tiny.path, options=options) as made:
        await start_all(made)
        for node in range(2):
            got = await ask(
                made,
                node,
                [
                    {"prompt": prompt, "temperature": 0.0, "max_new_tokens": len(answer), "dp_rank": rank}
                    for rank in range(2 * RANKS)
                    for prompt, answer in zip(tiny.prompts, tiny.tokens, strict=True)
                ],
            )
            assert [(tuple(tokens), end) for tokens, _, end in got] == [
                (answer, "OK") for _ in range(2 * RANKS) for answer in tiny.tokens
            ]
        await stop_all(made)


async def test_a_host_cut_off_ends_both_sides(hosts: Hosts) -> None:
    """Nobody is told: node 0 names the node, the other one node 0, and no stream hangs."""
    quick = ("--cluster-silent-seconds", "3", "--exchange-timeout-seconds", "30")
    stop = ("--resilience-on-rank-loss", "stop")
    endless = [{"prompt": "1+1=", "max_new_tokens": 2000, "ignore_eos": True, "timeout": WAIT}]
    async with nodes(ranks=1, hosts=hosts, options=(*quick, *stop)) as made:
        await start_all(made)
        processes = [rank for node in made.started for rank in node.ranks]
        async with asked(made, 0, endless) as first, asked(made, 1, endless) as second:
            await asyncio.gather(first.began(), second.began())
            hosts.cut(1)
            ((_, _, at_leader),), ((_, _, at_other),) = await asyncio.gather(
                first.answers(), second.answers()
            )
        assert at_leader.startswith("UNAVAILABLE: ") and at_other.startswith("UNAVAILABLE: ")
        assert "node 1 (rank 1) was silent for 3 s" in at_leader
        assert "node 0 at 198.18.0.1:50061 was silent for 3 s" in at_other
        assert [await node.end() for node in made.started] == [1, 1]
        assert left(processes) == []


@pytest.mark.slow
async def test_eight_ranks_start_serve_and_stop_as_one_server(hosts: Hosts) -> None:
    async with nodes(ranks=4, hosts=hosts) as made:
        await start_all(made)
        fields = {"prompt": "12+30=", "temperature": 0.0, "max_new_tokens": 8}
        got = await ask(made, 1, [fields | {"dp_rank": rank} for rank in range(8)])
        assert [(rank, end) for _, rank, end in got] == [(rank, "OK") for rank in range(8)]
        assert len({tuple(tokens) for tokens, _, _ in got}) == 1
        await stop_all(made)
