"""Ranks and nodes of a server of several nodes are lost, leave and come back. The oracle: an undisturbed run.

Real processes on the loopback. Streams are opened at node 0 unless a test says otherwise.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
from grpc import aio

from ep_server.cli.app import assemble
from ep_server.cluster.cluster_ranks import ClusterRanks
from ep_server.cluster.discovery import find_place, this_host
from ep_server.config import Config
from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts
from ep_server.v1 import control_pb2
from tests.support.cluster.asking import asked
from tests.support.cluster.nodes import DEMO_MODEL, Node, Nodes, nodes
from tests.support.fabric.fabric_ends import needs
from tests.support.frontend import Code
from tests.support.models.perturbed import perturbed
from tests.support.raw_client import RawClient

WAIT = 120.0
NEW = 300
SHORT = 80  # for a loss that nobody has to return from meanwhile
OPTIONS = (
    *("--model-dtype", "float32", "--exchange-reduction", "source", "--resilience-max-losses", "100"),
    *("--resilience-standby", "2"),
    *("--exchange-timeout-seconds", "30"),  # a busy machine must not look like a hang
)
# Everything whose state another rank must build again; prompts of two chunks too.
ASKED: list[dict[str, Any]] = [
    {"prompt": "12+30=", "temperature": 0.0},
    {"prompt": "7+5=" * 40, "temperature": 1.5, "seed": 1},
    {"prompt": "1+2=", "temperature": 1.5, "seed": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"prompt": "3+4=", "temperature": 2.0, "seed": 3, "num_sequences": 2},
    {"prompt": "5+6=", "temperature": 2.0, "seed": 4, "stop_strings": ["77"], "min_new_tokens": 50},
    {"prompt": "9+1=", "temperature": 1.5, "seed": 5, "output_logprobs": True, "top_n": 2},
]
CUT = [{"prompt": f"{n}+{7 * n + 3}=", "ignore_eos": True} for n in (4, 17, 30)]
_UNDISTURBED: dict[int, list[Any]] = {}  # alike from each server of the demo model; by tokens asked for


@pytest.fixture(autouse=True)
def network() -> None:
    needs("system")


@dataclass
class Streams:
    """Requests under way, and what came of them, event by event."""

    events: list[list[Any]] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def begun(self, tokens: int = 10) -> None:
        """Until so many tokens of each have come, in however many messages."""
        async with asyncio.timeout(WAIT):
            while not all(_tokens(events) > tokens for events in self.events):
                assert not any(task.done() and task.exception() for task in self.tasks)
                await asyncio.sleep(0.005)

    async def outputs(self) -> list[Any]:
        """Per request: token ids of each sequence, text and log probabilities."""
        async with asyncio.timeout(WAIT):
            await asyncio.gather(*self.tasks)
        return [_output(events) for events in self.events]


def _tokens(events: Sequence[Any]) -> int:
    return sum(len(event.tokens.token_ids) for event in events)


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

    async def rank(self, number: int) -> psutil.Process:
        """The process that is this rank now."""
        info = await self.client.server_info()
        return psutil.Process(next(rank.pid for rank in info.rank_info if rank.rank == number))

    async def back(self, node: int, *options: str) -> None:
        """Starts a node again, until all nodes serve. options: for this one."""
        self.nodes[node] = await self.made.start(node, *options)
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
async def cluster(
    count: int = 2,
    *options: str,
    own: Mapping[int, Path] = MappingProxyType({}),
    new: int = NEW,
    **values: Any,
) -> AsyncIterator[Cluster]:
    """own: checkpoints of single nodes. new: tokens of the outputs that are expected."""
    async with nodes(count=count, options=(*OPTIONS, *options), **values) as made:
        models = {node: ("--model", str(path)) for node, path in own.items()}
        everyone = [await made.start(node, *models.get(node, ())) for node in range(count)]
        for node in everyone:
            await node.serving(WAIT)
        async with RawClient(everyone[0].address) as client:
            if new not in _UNDISTURBED:
                _UNDISTURBED[new] = await ask(client, max_new_tokens=new).outputs()
            yield Cluster(made, everyone, client, _UNDISTURBED[new])


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


async def test_streams_at_every_node_outlive_a_killed_rank() -> None:
    async with cluster(new=SHORT) as served, RawClient(served.nodes[1].address) as other:
        streams, there = ask(served.client, max_new_tokens=SHORT), ask(other, max_new_tokens=SHORT, dp_rank=1)
        await streams.begun()
        await there.begun()
        (await served.rank(1)).kill()
        assert await streams.outputs() == await there.outputs() == served.expected
        await served.live(2)
        why = "rank 1 was lost: (killed by SIGKILL|rank 0 lost peer 1 in )"  # its peer may notice first
        await served.until(lambda: served.nodes[0].said(why))
        assert served.times("rank 1 was lost: ") == 1


@pytest.mark.parametrize("what", ["changed", "gone"])
async def test_a_node_whose_files_cannot_be_used_is_left(tmp_path: Path, what: str) -> None:
    """Node 1 has a copy of its own. It is no use to the others, whose files are as they were."""
    path = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    file = path / "model.safetensors"
    file.touch()
    async with cluster(2, own={1: path}, new=SHORT) as served:
        streams = ask(served.client, max_new_tokens=SHORT)
        await streams.begun()
        if what == "changed":
            (perturbed(DEMO_MODEL, tmp_path / "other", share=1.0) / file.name).replace(file)
        else:
            file.rename(tmp_path / "away")
        (await served.rank(1)).kill()
        assert await streams.outputs() == served.expected
        await served.live(1)
        assert await served.nodes[1].end() == 1
        why = {"changed": "its files hold other weights now", "gone": f"{path}.* is there"}[what]
        assert served.nodes[1].said(why), (served.nodes[1].lines[-10:], served.nodes[1].text[-10:])
        await served.until(lambda: served.nodes[0].said(why))
        if what == "gone":
            (tmp_path / "away").rename(file)
            await served.back(1, "--model", str(path))
            assert await ask(served.client, max_new_tokens=SHORT).outputs() == served.expected


@pytest.mark.slow
async def test_a_node_is_told_which_other_one_is_unfit(tmp_path: Path) -> None:
    """Node 1 serves, but could not start again: the group with node 2 does not come about."""
    path = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    async with cluster(3, own={1: path}) as served:
        served.nodes[2].signal(signal.SIGKILL)
        await served.live(2)
        (perturbed(DEMO_MODEL, tmp_path / "other", share=1.0) / "model.safetensors").replace(
            path / "model.safetensors"
        )
        streams = ask(served.client)
        await streams.begun()
        third = await served.made.start(2)
        assert await third.end() == 1
        why = "this node cannot take part: node 1, which serves, cannot start ranks again: rank 1: "
        assert any(why in line for line in (*third.text, *third.lines)), (third.lines[-10:], third.text[-10:])
        assert await streams.outputs() == served.expected
        assert served.times("recovered after") == 1


async def test_nodes_do_not_start_with_different_weights(tmp_path: Path) -> None:
    other = perturbed(DEMO_MODEL, tmp_path / "other", share=1.0)
    async with nodes(count=2, options=OPTIONS) as made:
        everyone = [await made.start(0), await made.start(1, "--model", str(other))]
        assert [await node.end() for node in everyone] == [1, 1]
        assert everyone[0].said(f"rank 1: model.path = '{other}': must be .* alike on all nodes")


async def test_a_server_that_recovered_ends_well() -> None:
    """A loss of long ago is not why it stops."""
    async with cluster(new=SHORT) as served:
        (await served.rank(1)).kill()
        await served.until(lambda: served.times("recovered after "))
        served.nodes[0].signal(signal.SIGTERM)
        assert [await node.end() for node in served.nodes] == [0, 0]
        assert not served.nodes[1].said("the server has ended")


@pytest.mark.slow
async def test_streams_outlive_a_rank_that_hangs() -> None:
    async with cluster(2, "--exchange-timeout-seconds", "4") as served:
        streams = ask(served.client)
        await streams.begun()
        (await served.rank(1)).suspend()
        assert await streams.outputs() == served.expected
        await served.live(2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_a_node_is_killed_at_any_moment(seed: int) -> None:
    draw = random.Random(seed)
    async with cluster(ranks=2) as served:
        for _ in range(2):
            streams = ask(served.client)
            await asyncio.sleep(draw.uniform(0.0, 2.0))
            served.nodes[1].signal(signal.SIGKILL)
            assert await streams.outputs() == served.expected
            streams = ask(served.client)
            await asyncio.sleep(draw.uniform(0.0, 2.0))
            await served.back(1)
            assert await streams.outputs() == served.expected
        await served.idle()


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.3, 1.0, 3.0])
async def test_two_nodes_are_lost_one_after_the_other(pause: float) -> None:
    """The second one while the loss of the first is noticed or repaired, or later."""
    async with cluster(3) as served:
        streams = ask(served.client)
        await streams.begun()
        served.nodes[1].signal(signal.SIGKILL)
        await asyncio.sleep(pause)
        served.nodes[2].signal(signal.SIGKILL)
        assert await streams.outputs() == served.expected
        await served.live(1)
        streams = ask(served.client)
        served.nodes[1:] = [await served.made.start(node) for node in (1, 2)]
        assert await streams.outputs() == served.expected
        await served.live(3)


@pytest.mark.slow
async def test_a_node_returns_while_a_rank_is_lost() -> None:
    async with cluster(3) as served:
        served.nodes[2].signal(signal.SIGKILL)
        await served.live(2)
        streams = ask(served.client)
        await streams.begun()
        served.nodes[2] = await served.made.start(2)
        await served.until(lambda: served.times("node 2 is back: preparing"))
        served.nodes[0].ranks[-1].kill()  # one that is prepared, on standby or in service
        (await served.rank(1)).kill()
        assert await streams.outputs() == served.expected
        await served.live(3)


@pytest.mark.slow
async def test_a_returning_node_is_lost_while_it_is_prepared() -> None:
    async with cluster() as served:
        served.nodes[1].signal(signal.SIGKILL)
        await served.live(1)
        streams = ask(served.client)
        await streams.begun()
        served.nodes[1] = await served.made.start(1)
        await served.until(lambda: served.times("node 1 is back: preparing"))
        served.nodes[1].signal(signal.SIGKILL)
        assert await streams.outputs() == served.expected
        await served.back(1)
        assert await ask(served.client).outputs() == served.expected


@pytest.mark.slow
async def test_a_node_that_flaps_stays_out() -> None:
    async with cluster(2, "--resilience-max-losses", "2") as served:
        for _ in range(2):
            served.nodes[1].signal(signal.SIGKILL)
            await served.live(1)
            served.nodes[1] = await served.made.start(1, "--cluster-connect-seconds", "5")
            if not served.times("stays out"):
                await served.until(lambda: served.times("node 1 is back") or served.times("stays out"))
        assert await served.nodes[1].end() == 1
        assert "node 1 was lost 2 times within 600 s and stays out" in served.nodes[1].text[-1]
        assert await ask(served.client).outputs() == served.expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scheduler-block-size", "8"), "node 1: scheduler.block_size = 8, node 0 has 16"),
        (("--fabric-domain", "nowhere0"), "this node cannot take part: rank 1: "),
    ],
    ids=["differs", "cannot-start"],
)
async def test_a_node_that_cannot_return_disturbs_nobody(options: tuple[str, ...], message: str) -> None:
    async with cluster() as served:
        served.nodes[1].signal(signal.SIGKILL)
        await served.live(1)
        streams = ask(served.client)
        await streams.begun()
        bad = await served.made.start(1, *options)
        assert await bad.end() == 1
        assert any(message in line for line in (*bad.text, *bad.lines))
        assert await streams.outputs() == served.expected
        assert served.times("recovered after") == 1
        await served.back(1)


@pytest.mark.slow
async def test_a_silent_node_is_left_behind_and_ends() -> None:
    async with cluster(2, "--cluster-silent-seconds", "3") as served:
        streams = ask(served.client)
        await streams.begun()
        served.nodes[1].signal(signal.SIGSTOP)
        assert await streams.outputs() == served.expected
        await served.live(1)
        served.nodes[1].signal(signal.SIGCONT)
        assert await served.nodes[1].end() == 1
        await served.back(1)


@pytest.mark.slow
async def test_server_ends_where_the_nodes_left_cannot_start(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    async with cluster(2, "--resilience-max-losses", "2", model=tmp_path / "model") as served:
        streams = ask(served.client)
        await streams.begun()
        (tmp_path / "model" / "config.json").unlink()
        served.nodes[1].signal(signal.SIGKILL)
        ends = await asyncio.gather(*streams.tasks, return_exceptions=True)
        assert {end.code() for end in ends if isinstance(end, aio.AioRpcError)} == {Code.UNAVAILABLE}
        assert all("the ranks did not start again" in end.details() for end in ends)
        assert await served.nodes[0].end() == 1


@pytest.mark.slow
async def test_streams_at_nodes_that_leave_end_well() -> None:
    async with cluster(3) as served, RawClient(served.nodes[1].address) as other:
        streams, there = ask(served.client), ask(other)
        await streams.begun()
        await there.begun()
        for node in (1, 2):
            served.nodes[node].signal(signal.SIGTERM)
        assert await streams.outputs() == await there.outputs() == served.expected
        assert [await node.end() for node in served.nodes[1:]] == [0, 0]
        await served.live(1)
        served.nodes[0].signal(signal.SIGTERM)
        assert await served.nodes[0].end() == 0


@pytest.mark.slow
async def test_a_node_cut_off_is_left_behind_and_ends() -> None:
    if why := namespaces.missing():
        pytest.skip(why)
    quick = ("--cluster-silent-seconds", "3")
    with Hosts(2) as hosts:
        async with nodes(hosts=hosts, options=(*OPTIONS, *quick)) as made:
            both = [await made.start(node) for node in range(2)]
            for node in both:
                await node.serving(WAIT)
            undisturbed = [{"temperature": 0.0, "max_new_tokens": 400, "timeout": WAIT, **one} for one in CUT]
            async with asked(made, 0, undisturbed) as first:
                expected = [tokens for tokens, _, _ in await first.answers()]
            async with asked(made, 0, undisturbed) as second:
                await second.began()
                hosts.cut(1)
                assert [(tokens, end) for tokens, _, end in await second.answers()] == [
                    (tokens, "OK") for tokens in expected
                ]
            assert both[0].said("rank 1 was lost: ")
            assert await both[1].end() == 1
            hosts.mend(1)
            again = await made.start(1)
            await again.serving(WAIT)
            async with asked(made, 0, undisturbed) as third:
                assert [tokens for tokens, _, _ in await third.answers()] == expected


@pytest.mark.slow
async def test_ranks_that_start_again_have_the_weights_in_force(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "new")
    async with cluster(2, "--model-updates", str(tmp_path)) as served:
        request = control_pb2.UpdateWeightsRequest(path=str(tmp_path / "new"))
        await served.client.control.UpdateWeights(request, timeout=WAIT)
        streams = ask(served.client)
        await streams.begun()
        served.nodes[1].signal(signal.SIGKILL)
        assert await streams.outputs() == served.expected
        await served.live(1)
        streams = ask(served.client)
        await served.back(1)
        assert await streams.outputs() == served.expected
        versions = {
            event.tokens.weights_version
            for events in streams.events
            for event in events
            if event.WhichOneof("event") == "tokens"
        }
        assert versions == {1}


@pytest.mark.slow
async def test_ranks_regroup_in_place_where_two_groups_have_no_room() -> None:
    """As on GPUs: the ranks that serve end before the next ones start."""
    async with nodes(options=OPTIONS) as made:
        values = {
            "model.path": str(DEMO_MODEL),
            "model.dtype": "float32",
            "cluster.nodes": 2,
            "cluster.node_rank": 0,
            "cluster.rendezvous": made.rendezvous,
            "exchange.reduction": "source",
            "exchange.timeout_seconds": 30,
            "fabric.address": "127.0.0.1",
            "grpc.port": 0,
            "metrics.enabled": False,
            "parallel.threads_per_rank": 1,
            "resilience.max_losses": 100,
            "resilience.standby": 2,
            "scheduler.kv_blocks": 256,
        }
        config = Config.from_values(values)
        place = find_place(config.cluster, this_host())
        other = await made.start(1)
        async with assemble(config, place=place) as app:
            ranks = app.server.engine._ranks
            assert isinstance(ranks, ClusterRanks)
            ranks._beside = False
            await app.server.start(lambda *_: None)
            try:
                async with RawClient(app.server.address) as client:
                    expected = await ask(client).outputs()
                    streams = ask(client)
                    await streams.begun()
                    other.signal(signal.SIGTERM)
                    assert await streams.outputs() == expected
                    assert await other.end() == 0
                    streams = ask(client)
                    await streams.begun()
                    await (await made.start(1)).serving(WAIT)
                    assert await streams.outputs() == expected
                    app.server.engine.check_integrity()
            finally:
                await app.server.drain()
                await app.server.stop()
