"""`ep-server chaos` against real ranks: it finds no fault where there is none, and says so where there is."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ep_server.cli.chaos.faults import (
    Fault,
    FaultKind,
    FaultPlan,
    Faults,
    Loss,
    ServerShape,
    parent_of,
    pids_here,
)
from ep_server.cli.chaos.report import Report
from ep_server.cli.chaos.rounds import HostHits, add_gaps, answers_of, compare, direct
from ep_server.cli.chaos.streams import KINDS, OF_TEXT, Answer, Asked, Lengths, draw_requests, seen
from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.cli.main import main
from ep_server.client import AsyncClient, PrefillDecode
from ep_server.client.results import Finished, Output, PromptInfo, TokenLogprob, Tokens, Usage
from ep_server.config import Config
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.protocol import pid_space
from ep_server.ranks.restarting import RestartingRanks
from ep_server.records import FinishReason
from ep_server.testing.fake_ranks import FakeRanks
from ep_server.v1 import control_pb2
from tests.support.cluster.nodes import nodes
from tests.support.fabric.fabric_ends import needs
from tests.support.frontend import serving
from tests.support.ranks.zygote import forking

WAIT = 240.0
# Blocks for a rank that was lost meanwhile are held until they expire.
# A request that is lost three times without a token ends, so tokens need time.
SELDOM = ["--every", "2"]
HANDOFF = {"exchange__timeout_seconds": 5.0, "handoff__hold_seconds": 5.0}
LOAD = ["--streams", "7", "--prompt-tokens", "2", "60", "--max-new-tokens", "60", "--every", "0.2"]


@pytest.fixture(scope="module", autouse=True)
def _ranks_are_forks() -> Iterator[None]:
    """Ranks are lost and started all the time."""
    with forking():
        yield


@asynccontextmanager
async def demo(**fields: Any) -> AsyncIterator[Server]:
    values = {
        "grpc.port": 0,
        "model.path": str(DEMO_MODEL),
        "model.dtype": "float32",
        "exchange.reduction": "source",
        "parallel.ranks": 3,
        "parallel.threads_per_rank": 1,
        "scheduler.kv_blocks": 256,
        "scheduler.max_step_tokens": 32,
    }
    config = Config.from_values(values | {name.replace("__", "."): value for name, value in fields.items()})
    ranks = RestartingRanks(lambda: RankProcesses(config, outlive=True))
    server = Server(config, ServedModel.load(config.model), ranks)
    await server.start(lambda *_: None)
    try:
        yield server
    finally:
        await server.drain()
        await server.stop()


async def chaos(server: Server, *arguments: str) -> int:
    async with asyncio.timeout(WAIT):
        return await asyncio.to_thread(main, ["chaos", "--address", server.address, "--json", *arguments])


async def test_losses_change_nothing_until_one_too_many(capfd: pytest.CaptureFixture[str]) -> None:
    async with demo(resilience__max_losses=2) as server:
        assert await chaos(server, *LOAD, "--faults", "2") == 0
        report = json.loads(capfd.readouterr().out)
        assert (
            report["good"]
            and report["exact"]
            and report["faults"] == {"kill": 2, "stall": 0, "server": 0, "node": 0, "scale": 0, "update": 0}
        )
        assert report["streams"] == 7 * report["rounds"] and len(report["recovery_seconds"]) == 3
        assert report["longest_gap_seconds"]["lost rank"] and not report["left"]
        assert await chaos(server, *LOAD, "--faults", "1", "--recover-seconds", "60") == 1
        report = json.loads(capfd.readouterr().out)
        assert not report["good"] and any("gave up" in line for line in report["errors"])


SCALES = {"parallel__max_ranks": 4, "resilience__spare_slots": "auto", "model__updates": "/"}
ALL_KINDS = [word for kind in ("kill", "scale", "update") for word in ("--kind", kind)]


async def test_scales_and_updates_change_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """At the end as many ranks serve as at the beginning, and none is held out."""
    async with demo(resilience__max_losses=100, resilience__rank_losses=0, **SCALES) as server:
        arguments = [*LOAD, "--faults", "6", "--scale-ranks", "2", "4", "--seed", "1"]
        assert await chaos(server, *arguments, *ALL_KINDS) == 0
        report = json.loads(capfd.readouterr().out)
        kinds = report["faults"]
        assert report["good"] and report["exact"] and sum(kinds.values()) == 6
        assert min(kinds["kill"], kinds["scale"], kinds["update"]) >= 1
        assert report["longest_gap_seconds"]["change"] and report["pause_seconds"]["max"] > 0
        async with AsyncClient(server.address) as client:
            info = await client.server_info()
        assert len(info.live_ranks) == 3 and not info.ranks_out and info.weights_version == kinds["update"]
        assert await chaos(server, *LOAD, "--kind", "scale", "--scale-ranks", "2", "5") == 1
        assert "--scale-ranks = (2, 5): must be two numbers" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_many_scales_and_updates_change_nothing() -> None:
    often = {"resilience__max_losses": 1000, "resilience__rank_losses": 0}
    async with demo(**often, **SCALES) as server, asyncio.timeout(3500):
        arguments = ["chaos", "--address", server.address, "--faults", "100", "--scale-ranks", "2", "4"]
        assert await asyncio.to_thread(main, [*arguments, *LOAD, *ALL_KINDS]) == 0


async def test_losses_on_either_side_of_a_hand_off(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank counts and block sizes differ. The caches are small, so prefixes return from the host tiers.

    Half of the prompts go through VllmEngine, as a gateway sends them.
    """
    sides = {"resilience__max_losses": 5, "scheduler__kv_host_gib": 0.01, **HANDOFF}
    first = {"parallel__ranks": 2, "scheduler__kv_blocks": 12}
    second = {"parallel__ranks": 3, "scheduler__kv_blocks": 20, "scheduler__block_size": 7}
    async with (
        demo(handoff__role="prefill", **first, **sides) as prefill,
        demo(handoff__role="decode", **second, **sides) as decode,
    ):
        arguments = [*LOAD, *SELDOM, "--faults", "3", "--prefill", prefill.address, "--gateway"]
        assert await chaos(decode, *arguments) == 0
        report = json.loads(capfd.readouterr().out)
        assert report["good"] and report["exact"] and report["faults"]["kill"] == 3
        assert report["handed_off"] and "host_tokens" in report
        cached = 0
        async with (
            asyncio.timeout(WAIT),
            AsyncClient(decode.address) as client,
            PrefillDecode(prefill.address, client, handle_seconds=WAIT) as pair,
        ):
            while cached < 39:  # it still works; again if a busy machine looked like silence
                stream = await pair.generate([*range(10)] * 4, max_new_tokens=4, bypass_prefix_cache=True)
                output = await stream.read()
                assert output.finished is not None
                cached = output.finished.usage.cached_tokens
            async with AsyncClient(prefill.address) as first_client:
                tiers, found = HostHits([first_client]), 0
                while not found:  # the prompts do not fit its cache together
                    for number in range(12):
                        await (await pair.generate([number] * 64, max_new_tokens=4)).read()
                    found = await tiers.look()
        assert cached == 39


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_many_losses_on_either_side_of_a_hand_off() -> None:
    sides = {"parallel__ranks": 2, "resilience__max_losses": 1000, **HANDOFF}
    async with (
        demo(handoff__role="prefill", **sides) as prefill,
        demo(handoff__role="decode", scheduler__block_size=4, **sides) as decode,
        asyncio.timeout(3500),
    ):
        arguments = ["chaos", "--address", decode.address, "--prefill", prefill.address, "--faults", "200"]
        assert await asyncio.to_thread(main, [*arguments, *LOAD, *SELDOM]) == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "faults",
    [["--faults", "200"], ["--faults", "50", "--together", "2"], ["--faults", "20", "--kind", "stall"]],
)
async def test_many_losses_change_nothing(faults: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    async with demo(resilience__max_losses=1000, parallel__ranks=4, exchange__timeout_seconds=5.0) as server:
        async with asyncio.timeout(3500):
            assert await asyncio.to_thread(main, ["chaos", "--address", server.address, *LOAD, *faults]) == 0
    print(capfd.readouterr().out)


async def test_servers_that_cannot_be_tried_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving() as served:
        assert await chaos(served.server) == 1
        assert "resilience.on_rank_loss" in capfd.readouterr().err
    async with serving(resilience__on_rank_loss="recover") as served:
        assert await chaos(served.server) == 1  # its ranks are no processes
        assert "must be a server of this machine" in capfd.readouterr().err
        assert await chaos(served.server, "--kind", "node") == 1
        assert "used with a server of several nodes" in capfd.readouterr().err
        assert await chaos(served.server, "--kind", "server") == 1
        assert "used with --prefill" in capfd.readouterr().err
        assert await chaos(served.server, "--gateway") == 1
        assert "used with --prefill" in capfd.readouterr().err
        assert await chaos(served.server, "--prompt-tokens", "5", "4") == 1
        assert "--prompt-tokens" in capfd.readouterr().err
        assert await chaos(served.server, "--kind", "update") == 1
        assert "model.updates" in capfd.readouterr().err
        assert await chaos(served.server, "--kind", "scale") == 1
        assert "--scale-ranks" in capfd.readouterr().err
        assert await chaos(served.server, "--kind", "update", "--prefill", "127.0.0.1:1") == 1
        assert "--prefill" in capfd.readouterr().err


async def test_ranks_and_nodes_of_a_server_of_several(capfd: pytest.CaptureFixture[str]) -> None:
    """Both nodes are processes of this machine; the second one is started again whenever it has ended."""
    needs("system")
    options = ("--model-dtype", "float32", "--exchange-reduction", "source", "--resilience-max-losses", "100")
    async with nodes(count=2, options=(*options, "--exchange-timeout-seconds", "10")) as made:
        for each in [await made.start(node) for node in range(2)]:
            await each.serving()

        async def supervise() -> None:
            while True:
                await made.started[-1].inner.wait()
                await made.start(1)

        supervisor = asyncio.create_task(supervise())
        arguments = ["chaos", "--address", made.started[0].address, "--json", *LOAD, *SELDOM, "--faults", "3"]
        kinds = ["--kind", "node", "--kind", "kill"]
        try:
            async with asyncio.timeout(WAIT):
                assert await asyncio.to_thread(main, [*arguments, *kinds]) == 0
                report = json.loads(capfd.readouterr().out)
                assert await asyncio.to_thread(main, [*arguments, "--kind", "scale"]) == 1
        finally:
            supervisor.cancel()
        assert "join and leave with their node" in capfd.readouterr().err
        assert report["good"] and report["exact"] and report["ranks_elsewhere"] == []
        assert report["faults"]["node"] == 2 and report["faults"]["kill"] == 1


def test_processes_of_other_machines_are_left_alone() -> None:
    spaces = [pid_space(), "another boot", pid_space(), ""]
    info = control_pb2.GetServerInfoResponse(
        rank_info=[
            control_pb2.RankInfo(rank=rank, pid=100 + rank, pid_space=space)
            for rank, space in enumerate(spaces)
        ]
    )
    assert pids_here(info) == {0: 100, 2: 102}


async def test_a_rank_that_has_ended_has_no_parent() -> None:
    """So the process that started it is not lost, and no loss is counted."""
    with subprocess.Popen(["sleep", "60"]) as rank:
        assert parent_of(rank.pid) == os.getpid()
        rank.kill()
    assert parent_of(rank.pid) is None
    unused: Any = None
    plan = FaultPlan(1, [FaultKind.SERVER], together=1, apart=0.0, every=1.0, recover_seconds=1.0)
    faults = Faults(unused, plan, ServerShape(1, 1, exact=True), unused, random.Random(0), [])
    await faults._lose_some({0: rank.pid}, FaultKind.SERVER)
    assert not faults.done and not faults.losses


async def test_a_request_meets_no_third_loss_in_a_row() -> None:
    """The server would end it as their cause. One of its two sequences has tokens all the time."""
    began = time.monotonic()
    answer = Answer(Output(), began, count=2)
    unused: Any = None
    plan = FaultPlan(3, [FaultKind.KILL], together=1, apart=0.0, every=1.0, recover_seconds=WAIT)
    faults = Faults(unused, plan, ServerShape(1, 1, exact=True), unused, random.Random(0), [answer])
    for at in (1, 2):
        await asyncio.wait_for(faults._streams_go_on(), WAIT)
        faults.done.append(Fault(FaultKind.KILL, 0, began + at))
        answer.arrivals.setdefault(0, []).append(began + at + 0.5)
    waiting = asyncio.ensure_future(faults._streams_go_on())
    assert (await asyncio.wait([waiting], timeout=0.2))[1] == {waiting}
    answer.arrivals[1] = [began + 2.6]
    await asyncio.wait_for(waiting, WAIT)
    faults.done += [Fault(FaultKind.KILL, 0, began + at) for at in (3, 4)]
    answer.failed = True  # nothing is left to wait for
    await asyncio.wait_for(faults._streams_go_on(), WAIT)


def test_which_ranks_a_fault_may_hit() -> None:
    one, two = ServerShape(1, 3, exact=True), ServerShape(2, 3, exact=True)
    hit = {
        (shape.nodes, kind.value): [rank for rank in range(6) if shape.may_lose(rank, kind)]
        for shape in (one, two)
        for kind in (FaultKind.KILL, FaultKind.SERVER, FaultKind.NODE)
    }
    assert hit[1, "kill"] == hit[1, "server"] == hit[2, "kill"] == [*range(6)] and hit[1, "node"] == []
    assert hit[2, "server"] == [0, 1, 2] and hit[2, "node"] == [3, 4, 5]
    assert [*two.ended_with(4, FaultKind.NODE)] == [3, 4, 5] and [*two.ended_with(4, FaultKind.KILL)] == [4]


def test_every_kind_of_request_is_asked() -> None:
    kinds = len(KINDS) + len(OF_TEXT)
    asked = draw_requests(random.Random(0), 2 * kinds, Lengths((3, 9), 5), 50, has_text=True)
    assert all(3 <= len(one.prompt_ids) <= 9 and max(one.prompt_ids) < 50 for one in asked)
    for number, kind in enumerate(KINDS + OF_TEXT):
        for one in (asked[number], asked[number + kinds]):
            assert kind.items() <= one.fields.items() and one.fields["max_new_tokens"] == 5
    assert not any(
        "regex" in one.fields
        for one in draw_requests(random.Random(0), 20, Lengths((1, 1), 1), 9, has_text=False)
    )


def test_gaps_are_those_that_overlap_a_loss() -> None:
    answer = Answer(Output(), 0.5, {0: [1.0, 2.0, 5.0, 6.5], 1: [1.0, 1.5]})
    assert answer.first_token == 0.5
    assert answer.gaps() == [3.0, 0.5]
    assert answer.gaps(2.5, 2.6) == [3.0]
    assert answer.gaps(1.2, 1.4) == [1.0, 0.5]
    assert answer.gaps(5.5, 9.0) == [1.5]
    assert answer.gaps(7.0, 9.0) == []


async def test_streams_without_a_token_are_an_error() -> None:
    """A server that never serves again would else hold up the command for ever."""
    asked = [Asked([1], {"max_new_tokens": count}) for count in (1, 4, 4)]
    async with serving(FakeRanks(2)) as served, AsyncClient(served.server.address) as client:
        (whole,) = await answers_of(direct(client), asked[:1], WAIT, [])
        assert isinstance(whole, Answer) and whole.output.token_ids == [2]
        served.ranks.hold()
        async with asyncio.timeout(WAIT):
            found = await answers_of(direct(client), asked, 0.5, [])
        assert [str(each) for each in found] == ["no stream has had a token for 0.5 s"] * 3
        report = Report(exact=True)
        assert compare(found, asked, [Output()] * 3, report) == [] and len(report.errors) == 3
        await served.until(lambda: served.server.engine.statistics().open_streams == 0)
        served.ranks.release()


def test_a_stream_counts_for_the_rank_that_it_is_on() -> None:
    """From the first token of its new rank on, not for the one where it began."""
    answer = Answer(Output(PromptInfo("a", "m", 1, rank=2, seed=0)), 0.5)
    for now, rank in ((1.0, 2), (2.0, 2), (5.0, 0), (6.0, 0), (9.0, 1)):
        answer.got(Tokens([7], "", [], 0, 0, rank=rank), now)
    assert answer.arrivals == {0: [1.0, 2.0, 5.0, 6.0, 9.0]}
    assert [answer.rank_at(time) for time in (0.0, 2.5, 5.5, 8.0, 10.0)] == [2, 2, 0, 0, 1]
    report = Report(exact=True)
    losses = [Loss(frozenset({rank}), began, ended) for rank, began, ended in ((2, 2.5, 5.5), (2, 6.5, 9.5))]
    done: Any = SimpleNamespace(losses=losses, changes=SimpleNamespace(done=[]))
    add_gaps(report, answer, done)
    assert report.gaps["lost rank"] == [3.0] and report.gaps["other ranks"] == [3.0]


def output(ids: list[int], logprob: float = -1.0) -> Output:
    finished = Finished(FinishReason.LENGTH, None, Usage(2, 0, len(ids)), None)  # type: ignore[arg-type]
    return Output(token_ids=ids, logprobs=[TokenLogprob(logprob)], finished=finished)


@pytest.mark.parametrize(
    ("other", "exact", "rounded"),
    [
        (output([1, 2]), True, True),
        (output([1, 3]), False, True),
        (output([1, 2], -1.5), False, True),
        (output([1]), False, False),
        (Output(token_ids=[1, 2]), False, False),
    ],
)
def test_what_makes_outputs_equal(other: Output, exact: bool, rounded: bool) -> None:
    one = output([1, 2])
    assert (seen(one, exact=True) == seen(other, exact=True)) is exact
    assert (seen(one, exact=False) == seen(other, exact=False)) is rounded
