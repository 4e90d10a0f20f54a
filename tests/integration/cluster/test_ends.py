"""How a server of several nodes ends: drained from either side, or by the loss of a rank, a node, its leader.

Nodes that may be lost and leave are in test_lost_nodes; most tests here switch that off.
Real processes on the loopback, one rank each; ports and addresses differ, the hosts do not.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import psutil
import pytest
from grpc import aio

from ep_server.client import SERVICE
from tests.support.cluster.nodes import WAIT, Node, left, nodes, serving
from tests.support.fabric.fabric_ends import needs
from tests.support.frontend import Code, failure, next_event, rest
from tests.support.raw_client import RawClient

STOP = ("--resilience-on-rank-loss", "stop")
# What a test stops for a while shall not look like a loss.
PATIENT = ("--exchange-timeout-seconds", "60", "--cluster-silent-seconds", "30")
# Its peer may notice before the node that has the process.
KILLED = r"(killed by SIGKILL|rank 0 lost peer 1 in )"


@pytest.fixture(autouse=True)
def network() -> None:
    needs("system")


@asynccontextmanager
async def streams(*servers: Node, new_tokens: int = 2000) -> AsyncIterator[list[Any]]:
    """One stream from each of these nodes, of which a token has come."""
    clients = [RawClient(server.address) for server in servers]
    try:
        calls = [
            client.generate("12+30=", ignore_eos=True, max_new_tokens=new_tokens, timeout=WAIT)
            for client in clients
        ]
        for call in calls:
            await next_event(call)
            await next_event(call)
        yield calls
    finally:
        for client in clients:
            await client.close()


@asynccontextmanager
async def amid(
    *servers: Node, new_tokens: int = 300
) -> AsyncIterator[tuple[list[Any], list[psutil.Process]]]:
    """Streams from all nodes, none of which can end: the ranks, which are yielded too, are stopped."""
    ranks = [rank for server in servers for rank in server.ranks]
    async with RawClient(servers[0].address) as client:
        while True:
            async with streams(*servers, new_tokens=new_tokens) as calls:
                for rank in ranks:
                    rank.suspend()
                try:
                    for _ in range(3):  # what the ranks had sent is read meanwhile
                        in_flight = (await client.loads()).in_flight
                    if in_flight == len(calls):
                        yield calls, ranks
                        return
                finally:
                    for rank in ranks:
                        with suppress(psutil.NoSuchProcess):
                            rank.resume()
                for call in calls:  # again: one had ended
                    await rest(call)


@asynccontextmanager
async def health(*servers: Node) -> AsyncIterator[Callable[..., Awaitable[list[bool]]]]:
    """Yields what asks each of these nodes whether a service is SERVING."""
    clients = [RawClient(server.address) for server in servers]

    async def ask(service: str = SERVICE) -> list[bool]:
        return [await client.serving(service, timeout=WAIT) for client in clients]

    try:
        yield ask
    finally:
        for client in clients:
            await client.close()


@pytest.mark.parametrize("told", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["leader", "follower"])
async def test_whoever_is_told_to_stop_all_drain_and_end_well(told: int) -> None:
    async with serving(options=(*STOP, *PATIENT)) as servers:
        processes = [rank for server in servers for rank in server.ranks]
        assert len(processes) == 2
        async with amid(*servers) as (calls, ranks), health(*servers) as healthy:
            assert await healthy() == [True, True]
            servers[told].signal(signal.SIGTERM)
            async with asyncio.timeout(WAIT):
                while await healthy() != [False, False]:
                    assert not any(call.done() for call in calls)
            assert await healthy("") == [True, True]  # a probe that restarts Pods leaves them alone
            for rank in ranks:
                rank.resume()
            for call in calls:
                assert (await rest(call))[-1].finished.usage.output_tokens == 300
        assert [await server.end() for server in servers] == [0, 0]
        assert left(processes) == []
        assert [server.text for server in servers] == [[], []]
        assert all(server.said(r"^libfabric \S+, provider \S+, ") for server in servers)  # by each rank


@pytest.mark.parametrize(
    ("first", "awaited"),
    [
        pytest.param(1, "node 1 got a signal to stop", id="follower-first", marks=pytest.mark.slow),
        pytest.param(0, "draining, at most", id="leader-first", marks=pytest.mark.slow),
        pytest.param(0, "", id="at-once"),
    ],
)
async def test_both_nodes_told_to_stop_still_drain(first: int, awaited: str) -> None:
    """A stop that comes from the other node is no first signal: the own first one does not stop at once."""
    async with serving() as servers, streams(*servers, new_tokens=300) as calls:
        servers[first].signal(signal.SIGTERM)
        if awaited:
            await servers[0].until(lambda: servers[0].said(awaited))
        servers[1 - first].signal(signal.SIGTERM)
        for call in calls:
            assert (await rest(call))[-1].finished.usage.output_tokens == 300
        assert [await server.end() for server in servers] == [0, 0]
        assert servers[0].said("draining, at most")


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1], ids=["leader-first", "follower-first"])
async def test_64_streams_end_well_when_both_nodes_stop(first: int) -> None:
    async with serving() as servers, streams(*servers * 32, new_tokens=60) as calls:
        servers[first].signal(signal.SIGTERM)
        servers[1 - first].signal(signal.SIGTERM)
        ends = [(await rest(call))[-1].finished.usage.output_tokens for call in calls]
        assert ends == [60] * 64
        assert [await server.end() for server in servers] == [0, 0]


async def test_a_second_own_signal_stops_at_once() -> None:
    """Also where another node asked first."""
    async with serving(options=PATIENT) as servers, amid(*servers, new_tokens=2000) as (calls, ranks):
        servers[1].signal(signal.SIGTERM)
        await servers[0].until(lambda: servers[0].said("node 1 got a signal to stop"))
        servers[0].signal(signal.SIGTERM)
        servers[0].signal(signal.SIGTERM)
        servers[0].signal(signal.SIGINT)
        for rank in ranks:
            rank.resume()
        for call in calls:
            assert (await failure(call)).code() is Code.UNAVAILABLE
        assert [await server.end() for server in servers] == [0, 0]


@pytest.mark.parametrize("told", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["leader", "follower"])
async def test_signals_up_to_the_last_moment_change_no_exit_code(told: int) -> None:
    async with serving() as servers:
        inner = servers[told].inner
        async with asyncio.timeout(WAIT):
            while inner.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(inner.pid, signal.SIGTERM)  # send_signal() would take the exit code away
                await asyncio.sleep(0.001)
        assert inner.returncode == 0


async def test_every_node_sends_goaway_when_one_is_told_to_stop() -> None:
    async with (
        serving(options=(*STOP, *PATIENT)) as servers,
        amid(*servers) as (calls, ranks),
        AsyncExitStack() as stack,
    ):
        channels = [
            await stack.enter_async_context(aio.insecure_channel(server.address)) for server in servers
        ]
        async with asyncio.timeout(WAIT):
            for channel in channels:
                await channel.channel_ready()
            servers[1].signal(signal.SIGTERM)
            for channel in channels:
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert not any(call.done() for call in calls)
        for rank in ranks:
            rank.resume()
        for call in calls:
            assert (await rest(call))[-1].finished.usage.output_tokens == 300


async def test_a_node_that_is_killed_ends_the_server_and_is_named() -> None:
    async with serving(options=STOP) as servers:
        processes = [rank for server in servers for rank in server.ranks]
        async with streams(servers[0]) as (call,):
            servers[1].signal(signal.SIGKILL)
            error = await failure(call)
        assert error.code() is Code.UNAVAILABLE
        assert "node 1 (rank 1) closed the link" in error.details()
        assert await servers[0].end() == 1
        assert servers[0].said(r"node 1 \(rank 1\) closed the link")
        assert left(processes) == []


async def test_without_its_leader_a_node_ends_with_its_streams() -> None:
    async with serving() as servers:
        processes = [rank for server in servers for rank in server.ranks]
        async with streams(servers[1]) as (call,):
            servers[0].signal(signal.SIGKILL)
            error = await failure(call)
        assert error.code() is Code.UNAVAILABLE
        assert "node 0 at 127.0.0.1:" in error.details()
        assert await servers[1].end() == 1
        assert left(processes) == []


async def test_a_rank_that_is_lost_anywhere_ends_all_nodes() -> None:
    async with serving(options=STOP) as servers:
        processes = [rank for server in servers for rank in server.ranks]
        async with streams(*servers) as calls:
            servers[1].ranks[0].kill()
            for call in calls:
                error = await failure(call)
                assert error.code() is Code.UNAVAILABLE
                assert re.match(f"rank 1 was lost: {KILLED}", error.details()), error.details()
        assert [await server.end() for server in servers] == [1, 1]
        assert servers[1].said(f"the server has ended: rank 1 was lost: {KILLED}")
        assert left(processes) == []


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["busy", "idle"])
async def test_a_stopped_rank_of_another_node_is_named(busy: bool) -> None:
    """Not one that waited for it, nor any other of its node."""
    for seconds in (3, 12):  # the second one if a busy machine has held up another rank for as long
        if await names_a_stopped_rank(busy, seconds):
            return
    raise AssertionError("another rank was lost")


async def names_a_stopped_rank(busy: bool, seconds: int) -> bool:
    """seconds: hang timeout. Returns: whether it is the one that was lost."""
    async with serving(ranks=2, options=(*STOP, "--exchange-timeout-seconds", str(seconds))) as servers:
        stopped = servers[1].ranks[1]
        async with streams(*servers, new_tokens=2000 if busy else 10) as calls:
            if not busy:
                for call in calls:
                    await rest(call)
            stopped.suspend()
            await servers[0].until(lambda: servers[0].said("rank . was lost"))
            if not servers[0].said("rank 3 was lost"):
                stopped.resume()
                return False
            if busy:
                for call in calls:
                    details = (await failure(call)).details()
                    waited = "rank . timed out in|rank . lost peer 3 in"
                    assert re.match(f"rank 3 was lost: ({waited}|was stopped) ", details), details
        assert [await server.end() for server in servers] == [1, 1]
        silent = f"did not answer for {seconds} s"
        assert servers[0].said(f"rank 3 was lost: (rank .|{silent}|was stopped by a signal)")
        assert servers[1].said("the server has ended: rank 3 was lost: ")
    return True


async def test_a_rendezvous_in_use_is_one_line() -> None:
    async with nodes() as made:
        with socket.create_server(("127.0.0.1", int(made.rendezvous.rpartition(":")[2]))):
            leader = await made.start(0)
            assert await leader.end() == 1
        (line,) = leader.text
        assert line.startswith("ep-server: error: cluster.rendezvous = ") and "in use" in line


async def test_stop_before_all_nodes_joined_ends_cleanly() -> None:
    async with nodes(count=3) as made:
        alone = await made.start(1)
        await alone.until(lambda: alone.said("joining node 0"))
        alone.signal(signal.SIGTERM)
        assert await alone.end() == 0
        leader, other = await made.start(0), await made.start(2)
        await other.until(lambda: other.said("has joined node 0"))
        other.signal(signal.SIGTERM)
        assert [await leader.end(), await other.end()] == [0, 0]
        assert leader.text == other.text == []


async def test_a_node_that_is_slow_only_delays() -> None:
    async with serving(options=PATIENT) as servers, RawClient(servers[0].address) as client:
        asked = {"ignore_eos": True, "max_new_tokens": 300, "temperature": 0.0, "timeout": WAIT}
        expected = (await client.complete("12+30=", **asked)).token_ids
        call = client.generate("12+30=", **asked)
        events = [await next_event(call), await next_event(call)]  # it is under way
        stopped = [servers[1].process, *servers[1].ranks]
        for process in stopped:
            process.suspend()
        await asyncio.sleep(1.5)  # less than what makes it silent
        for process in stopped:
            process.resume()
        events += await rest(call)
        assert len(expected) == 300
        assert [token for event in events for token in event.tokens.token_ids] == expected


@pytest.mark.slow
async def test_suspended_node_is_silent_and_exits_when_resumed() -> None:
    async with serving(options=(*STOP, "--cluster-silent-seconds", "3")) as servers:
        processes = [rank for server in servers for rank in server.ranks]
        async with streams(servers[0]) as (call,):
            servers[1].signal(signal.SIGSTOP)
            error = await failure(call)
        assert error.code() is Code.UNAVAILABLE
        assert "node 1 (rank 1) was silent for 3 s" in error.details()
        assert await servers[0].end() == 1
        servers[1].signal(signal.SIGCONT)
        assert await servers[1].end() == 1
        assert servers[1].said("every stream ends, this node stops")
        assert left(processes) == []


@pytest.mark.slow
async def test_without_a_sign_of_its_leader_a_node_ends() -> None:
    async with serving(options=(*STOP, "--cluster-silent-seconds", "3")) as servers:
        processes = servers[1].ranks
        async with streams(servers[1]) as (call,):
            servers[0].signal(signal.SIGSTOP)
            error = await failure(call)
        assert error.code() is Code.UNAVAILABLE
        assert "was silent for 3 s" in error.details()
        assert await servers[1].end() == 1
        assert left(processes) == []
        servers[0].signal(signal.SIGCONT)
        assert await servers[0].end() == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1], ids=["leader", "follower"])
async def test_a_node_that_is_killed_while_ranks_load_ends_the_others(killed: int) -> None:
    async with nodes(ranks=2) as made:
        both = [await made.start(node) for node in range(2)]
        await both[1].until(lambda: len(both[1].ranks) == 2 or both[1].said("has joined"))
        async with asyncio.timeout(WAIT):
            while not all(len(node.ranks) == 2 for node in both):
                await asyncio.sleep(0)
        processes = [rank for node in both for rank in node.ranks]
        both[killed].signal(signal.SIGKILL)
        assert await both[1 - killed].end() == 1
        expected = "node 0 at .* closed the link" if killed == 0 else "node 1 .ranks 2-3. closed the link"
        assert both[1 - killed].said(expected)
        assert left(processes) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
async def test_whatever_is_killed_at_whatever_moment_everything_ends(seed: int) -> None:
    """A node or a rank of three nodes, from the start of ranks to well after the last is warm."""
    choice = random.Random(seed)
    async with nodes(count=3, options=STOP) as made:
        servers = [await made.start(node) for node in range(3)]
        await servers[0].until(lambda: servers[0].said("all 3 nodes have joined"))
        await asyncio.sleep(choice.uniform(0, 12))
        processes = [rank for server in servers for rank in server.ranks]
        victims = [*(server.process for server in servers), *processes]
        victim = choice.choice(victims)
        victim.kill()
        codes = [await server.end() for server in servers]
        assert codes == [-9 if server.inner.pid == victim.pid else 1 for server in servers]
        assert left(processes) == []


async def test_mismatched_node_exits_and_the_leader_keeps_waiting() -> None:
    async with nodes() as made:
        leader = await made.start(0)
        other = await made.start(1, "--scheduler-block-size", "32")
        assert await other.end() == 1
        line = "node 1: scheduler.block_size = 32, node 0 has 16"
        assert other.text == [f"ep-server: error: {line}"]
        await leader.until(lambda: leader.said(f": {line}"))
        late = await made.start(1)
        await asyncio.gather(leader.serving(), late.serving())
        leader.signal(signal.SIGTERM)
        assert [await leader.end(), await late.end()] == [0, 0]


@pytest.mark.slow  # test_joining has the same without processes
async def test_a_node_that_never_comes_ends_the_others_with_its_name() -> None:
    async with nodes(count=3, options=("--cluster-connect-seconds", "8")) as made:
        leader, first = await made.start(0), await made.start(1)
        assert [await leader.end(), await first.end()] == [1, 1]
        message = "node 2 did not join within 8 s"
        assert leader.text == [f"ep-server: error: {message}"]
        assert first.said(f"the server has ended: {message}")


@pytest.mark.slow
async def test_leader_names_a_remote_rank_that_cannot_start() -> None:
    async with nodes() as made:
        leader, other = await made.start(0), await made.start(1, "--fabric-domain", "nowhere0")
        assert [await leader.end(), await other.end()] == [1, 1]
        assert leader.text[-1].startswith("ep-server: error: rank 1: ") and "nowhere0" in leader.text[-1]
