"""Who is let in at the rendezvous, over real connections, and what others hear. No rank is started."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

import ep_server
from ep_server.cluster import follower
from ep_server.cluster import link as link_module
from ep_server.cluster.claim import Claim, claim_of, hello_of
from ep_server.cluster.discovery import NodePlace
from ep_server.cluster.follower import Joining, joined
from ep_server.cluster.leader import Leader
from ep_server.cluster.link import Link
from ep_server.cluster.security import bind_address, channel_credentials, first_token, token_metadata
from ep_server.config import Config
from ep_server.errors import ConfigError, StartupError, Unavailable
from ep_server.ranks.hosts import Rank, ended
from ep_server.ranks.process import RankCallbacks
from ep_server.v1 import nodes_pb2 as pb
from ep_server.v1 import nodes_pb2_grpc
from tests.support.certificates import make_certificates
from tests.support.cluster.joining_node import hold_up

MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"
NODES = 3
WAIT = 60.0  # seconds after which a test has failed
IGNORED = RankCallbacks(lambda *_: None, lambda *_: None, lambda *_: None)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def config_of(node: int, **options: Any) -> Config:
    values = {
        "model.path": str(MODEL),
        "cluster.nodes": NODES,
        "cluster.node_rank": node,
        "cluster.connect_seconds": WAIT,
        "parallel.threads_per_rank": 1,
    }
    return Config.from_values(values | {name.replace("__", "."): value for name, value in options.items()})


async def spawn(
    leader: Leader, callbacks: RankCallbacks, started: Callable[[Rank], None] = lambda rank: None
) -> None:
    """The first group of ranks, once all nodes have joined."""
    await leader.all_joined()
    await leader.group().spawn(callbacks, started)


@dataclass
class Rendezvous:
    """Node 0, which waits. options: that all nodes share. waiting: its spawn, which needs all nodes."""

    leader: Leader
    place: NodePlace
    options: dict[str, Any]
    waiting: asyncio.Task[None]

    def joining(self, **options: Any) -> Joining:
        cluster = config_of(1, **(self.options | options)).cluster
        return Joining(
            self.place.address,
            channel_credentials(cluster),
            token_metadata(cluster),
            cluster.connect_seconds,
            cluster.silent_seconds,
        )

    def claim(self, node: int, **options: Any) -> Claim:
        return claim_of(config_of(node, **(self.options | options)))[0]

    def join(self, claim: Claim, **options: Any) -> Any:
        """`async with` gives the link of a node that makes this claim."""
        return joined(self.joining(**options), hello_of(claim), lambda _: None)

    async def refused(self, claim: Claim, **options: Any) -> str:
        with pytest.raises(StartupError) as caught:
            async with asyncio.timeout(WAIT), self.join(claim, **options):
                pass
        return str(caught.value)


@asynccontextmanager
async def rendezvous(**options: Any) -> AsyncIterator[Rendezvous]:
    place = NodePlace(0, NODES, "127.0.0.1", free_port())
    config = config_of(0, **options)
    leader = Leader(config, place)
    await leader.open(lambda server: None)
    waiting = asyncio.create_task(spawn(leader, IGNORED))
    try:
        yield Rendezvous(leader, place, options, waiting)
    finally:
        waiting.cancel()
        await asyncio.wait((waiting,))
        await leader.close(0, "")


def other_shape(claim: Claim) -> Claim:
    return replace(claim, model=claim.model | {"config.json hidden_size": 1})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: replace(c, version="0.0"), "node 1: version 0.0, node 0 has " + ep_server.__version__),
        (
            lambda c: replace(c, config=c.config | {"scheduler.block_size": 32}),
            "node 1: scheduler.block_size = 32, node 0 has 16",
        ),
        (other_shape, "node 1: model: config.json hidden_size = 1, node 0 has 128"),
        (lambda c: replace(c, node=3), "cluster.node_rank = 3: must be 1 to 2, node 0 has 3 nodes"),
        (lambda c: replace(c, node=0), "cluster.node_rank = 0: must be 1 to 2, node 0 has 3 nodes"),
    ],
    ids=["version", "option", "model", "beyond", "leader"],
)
async def test_a_node_that_differs_hears_in_what(change: Callable[[Claim], Claim], expected: str) -> None:
    async with rendezvous() as meeting:
        own = meeting.claim(1)
        assert await meeting.refused(change(own)) == expected
        async with asyncio.timeout(WAIT), meeting.join(own) as link:  # node 0 still takes the right one
            assert link.reason == ""


async def test_node_number_is_free_again_when_its_node_leaves() -> None:
    async with rendezvous() as meeting, asyncio.timeout(WAIT):
        claim = meeting.claim(1)
        async with meeting.join(claim) as first:
            assert "another node joined under this number" in await meeting.refused(claim)
            assert first.reason == ""  # it lives, and stays
        while "joined=[]" not in repr(meeting.leader):  # it has to notice
            await asyncio.sleep(0)
        async with meeting.join(claim) as link:
            assert link.reason == ""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silence above gRPC, whose own threads go on in these tests, is not borne for longer."""
    monkeypatch.setattr(link_module, "STUCK", 1)


@pytest.mark.usefixtures("impatient")
async def test_returning_node_takes_over_its_broken_link(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        rendezvous(cluster__silent_seconds=1.0) as meeting,
        aio.insecure_channel(meeting.place.address) as channel,
    ):
        claim = meeting.claim(1)

        async def say() -> AsyncIterator[pb.Bundle]:
            yield pb.Bundle(messages=[pb.NodeMessage(hello=hello_of(claim))])
            await asyncio.sleep(WAIT)  # and nothing more, nor an end: as a host that was switched off

        await nodes_pb2_grpc.NodesStub(channel).Join(say()).read()
        async with asyncio.timeout(WAIT / 3), meeting.join(claim) as link:
            assert "claims its number; checking whether it is alive" in caplog.text
            assert "node 1 was silent for 1 s" in caplog.text
            assert "joined=[1]" in repr(meeting.leader)
            await asyncio.sleep(2.0)  # what is left of the old one does not end the new one
            assert link.reason == "" and "joined=[1]" in repr(meeting.leader)
            assert "another node joined under this number" in await meeting.refused(claim)


@pytest.mark.usefixtures("impatient")
async def test_second_claim_is_refused_only_once_the_first_is_alive() -> None:
    """The first may be a try of the same node whose connection broke unnoticed: it must not win for ever."""
    async with (
        rendezvous(cluster__silent_seconds=1.0) as meeting,
        aio.insecure_channel(meeting.place.address) as channel,
    ):
        claim = meeting.claim(1)

        async def say() -> AsyncIterator[pb.Bundle]:
            yield pb.Bundle(messages=[pb.NodeMessage(hello=hello_of(claim))])
            await asyncio.sleep(WAIT)  # and nothing more

        stub = nodes_pb2_grpc.NodesStub(channel)
        dumb = [stub.Join(say()) for _ in range(3)]
        async with asyncio.timeout(WAIT / 3):
            for call in dumb:  # each takes the place once the one before has fallen silent
                assert isinstance(await call.read(), pb.Bundle)
            async with meeting.join(claim) as link:
                assert "another node joined under this number" in await meeting.refused(claim)
                assert link.reason == ""


async def test_the_end_tells_all_nodes_code_and_reason() -> None:
    heard: dict[int, list[pb.NodeMessage]] = {1: [], 2: []}
    async with rendezvous() as meeting, AsyncExitStack() as nodes, asyncio.timeout(WAIT):
        links: list[Link] = []
        for node in (1, 2):
            hello = hello_of(meeting.claim(node))
            links.append(
                await nodes.enter_async_context(joined(meeting.joining(), hello, heard[node].append))
            )
            meeting.waiting.cancel()  # both come, and no rank shall start
        meeting.leader.publish(serving=True)
        await meeting.leader.close(1, "rank 3 was lost")
        assert [await link.ended() for link in links] == ["closed the link"] * 2
    for messages in heard.values():
        assert [m.WhichOneof("kind") for m in messages] == ["state", "end"]
        assert (messages[1].end.code, messages[1].end.reason) == (1, "rank 3 was lost")


async def test_a_node_that_was_told_to_stop_says_so() -> None:
    asked = asyncio.Event()
    async with rendezvous() as meeting, asyncio.timeout(WAIT):
        meeting.leader.on_stop_asked = asked.set
        async with meeting.join(meeting.claim(1)) as link:
            link.send(stop_asked=pb.StopAsked())
            await asked.wait()


async def test_all_ranks_get_the_smallest_kv_blocks_and_global_numbers() -> None:
    place = NodePlace(0, 2, "127.0.0.1", free_port())
    options = {"cluster__nodes": 2, "parallel__ranks": 2, "model__name": "silent"}
    leader = Leader(config_of(0, **options), place, module="tests.support.ranks.odd_rank")
    await leader.open(lambda server: None)
    started: list[Rank] = []
    spawning = asyncio.create_task(spawn(leader, IGNORED, started.append))
    hello = hello_of(claim_of(config_of(1, **options))[0])
    heard: asyncio.Queue[pb.NodeMessage] = asyncio.Queue()
    joining = Joining(place.address, None, tuple, WAIT, 5.0)
    try:
        async with asyncio.timeout(WAIT), joined(joining, hello, heard.put_nowait) as link:
            plan = (await heard.get()).plan
            assert list(plan.nodes) == [0, 1]
            link.send(planned=pb.Planned(group=plan.group, kv_blocks=7))  # of a host with little memory
            assert (await heard.get()).spawn.kv_blocks == 7
            await spawning
            assert [rank.rank for rank in started] == [0, 1, 2, 3]
            started[3].send(b"for rank 3")
            frame = (await heard.get()).rank_frame
            assert (frame.rank, frame.payload) == (3, b"for rank 3")
    finally:
        for rank in started[:2]:
            rank.signal(signal.SIGKILL)
        await ended(started, WAIT)
        for rank in started:
            rank.close()
        await leader.close(0, "")


async def test_node_0_alone_warns_of_unread_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(MODEL, tmp_path / "copy")
    file = tmp_path / "copy" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"logit_scale": 0.5}))
    async with rendezvous(model__path=str(tmp_path / "copy")) as meeting:
        own = meeting.claim(1)
        async with asyncio.timeout(WAIT), meeting.join(own):
            pass
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warnings if "logit_scale" in text] == [
        "there are keys of config.json that are not read (1: logit_scale)"
    ]


async def test_nodes_that_do_not_come_are_named_with_the_last_refusal() -> None:
    for seconds in (2.0, 15.0):  # the second one if a busy machine has let the first one pass
        async with rendezvous(cluster__connect_seconds=seconds) as meeting, asyncio.timeout(WAIT):
            await meeting.refused(replace(meeting.claim(2), version="0"))
            async with meeting.join(meeting.claim(1)):
                with pytest.raises(StartupError) as caught:
                    await meeting.waiting
        if not str(caught.value).startswith("nodes 1, 2 "):
            break
    expected = f"node 2 did not join within {seconds:g} s (refused: node 2: version 0, "
    assert str(caught.value).startswith(expected)


async def test_a_refusal_that_beats_the_first_write_is_still_named() -> None:
    """gRPC ends about half of such calls as INTERNAL, if the server runs beside this event loop."""
    server = grpc.server(ThreadPoolExecutor(1))  # it knows no method
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    joining = Joining(f"127.0.0.1:{port}", None, tuple, WAIT, 5.0)
    try:
        for _ in range(10):
            with pytest.raises(StartupError, match="refuses this node: UNIMPLEMENTED"):
                async with asyncio.timeout(WAIT), joined(joining, pb.Hello(), lambda _: None):
                    pass
    finally:
        await asyncio.to_thread(server.stop(0).wait, WAIT)


async def test_a_leader_that_never_comes_is_named() -> None:
    async with rendezvous() as meeting:
        claim = meeting.claim(1)
        nowhere = replace(meeting, place=NodePlace(1, NODES, "127.0.0.1", free_port()))
        message = await nowhere.refused(claim, cluster__connect_seconds=1.0)
    why = "(UNAVAILABLE: |it does not answer$)"
    assert re.match(f"node 0 at {nowhere.place.address} was not reached in 1 s: {why}", message), message


async def test_a_node_that_is_early_waits_for_the_leader() -> None:
    place = NodePlace(0, NODES, "127.0.0.1", free_port())
    claim, _ = claim_of(config_of(1))
    early = Joining(place.address, None, tuple, WAIT, 5.0)

    async def come() -> str:
        async with joined(early, hello_of(claim), lambda _: None) as link:
            return link.reason

    coming = asyncio.create_task(come())
    await asyncio.sleep(0.3)
    assert not coming.done()
    leader = Leader(config_of(0), place)
    await leader.open(lambda server: None)
    waiting = asyncio.create_task(spawn(leader, IGNORED))
    async with asyncio.timeout(WAIT):
        assert await coming == ""
    waiting.cancel()
    await asyncio.wait((waiting,))
    await leader.close(0, "")


@pytest.mark.parametrize("first", [None, pb.Bundle(), pb.Bundle(messages=[pb.NodeMessage(end=pb.End())])])
async def test_who_does_not_say_hello_is_sent_away(first: pb.Bundle | None) -> None:
    async def say() -> AsyncIterator[pb.Bundle]:
        if first is not None:
            yield first
        await asyncio.sleep(WAIT)

    async with (
        rendezvous(cluster__silent_seconds=0.5) as meeting,
        aio.insecure_channel(meeting.place.address) as channel,
    ):
        call = nodes_pb2_grpc.NodesStub(channel).Join(say())
        with pytest.raises(aio.AioRpcError, match="must be Hello alone"):
            await call.read()


@pytest.mark.usefixtures("impatient")
async def test_node_that_stops_reading_is_lost_despite_queued_data() -> None:
    place = NodePlace(0, 2, "127.0.0.1", free_port())
    options = {"cluster__nodes": 2, "model__name": "silent", "cluster__silent_seconds": 0.5}
    leader = Leader(config_of(0, **options), place, module="tests.support.ranks.odd_rank")
    await leader.open(lambda server: None)
    started: list[Rank] = []
    lost: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    callbacks = replace(IGNORED, on_host_lost=lambda rank, why: lost.put_nowait((rank, why)))
    spawning = asyncio.create_task(spawn(leader, callbacks, started.append))
    hello = hello_of(claim_of(config_of(1, **options))[0])

    async def say() -> AsyncIterator[pb.Bundle]:
        yield pb.Bundle(messages=[pb.NodeMessage(hello=hello)])
        yield pb.Bundle(messages=[pb.NodeMessage(planned=pb.Planned(group=1, kv_blocks=7))])
        await asyncio.sleep(WAIT)

    try:
        # Long before gRPC itself gives a connection up.
        async with asyncio.timeout(WAIT / 3), aio.insecure_channel(place.address) as channel:
            call = nodes_pb2_grpc.NodesStub(channel).Join(say())
            await call.read()
            await spawning
            for _ in range(40):  # more than a connection takes in by itself
                started[1].send(bytes(1 << 20))
            assert await lost.get() == (1, "node 1 (rank 1) was silent for 0.5 s")
    finally:
        started[0].signal(signal.SIGKILL)
        await ended(started[:1], WAIT)
        started[0].close()
        await leader.close(0, "")


@asynccontextmanager
async def joined_process(meeting: Rendezvous) -> AsyncIterator[asyncio.subprocess.Process]:
    """Node 1 as a process of its own."""
    joining = meeting.joining()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.cluster.joining_node"),
        *(joining.address, str(joining.silent_seconds)),
        hello_of(meeting.claim(1)).SerializeToString().hex(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"joined\n"
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_busy_event_loop_is_no_silence_a_stopped_process_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Either loop is held up for three silences, and so is every thread that needs the interpreter."""
    reason = b""
    for seconds in (1, 5):  # the second one if a busy machine has stopped a process for as long as the first
        async with (
            rendezvous(cluster__silent_seconds=float(seconds)) as meeting,
            asyncio.timeout(WAIT),
            joined_process(meeting) as process,
        ):
            assert process.stdin is not None and process.stdout is not None
            hold_up(3 * seconds)
            process.stdin.write(b"hold up\n")
            assert await process.stdout.readline() == b"went on\n"
            await asyncio.sleep(seconds)
            process.stdin.write(b"reason\n")
            reason = await process.stdout.readline()
            if reason != b"alive\n" or "joined=[1]" not in repr(meeting.leader):
                continue
            process.send_signal(signal.SIGSTOP)
            while "joined=[]" not in repr(meeting.leader):
                await asyncio.sleep(0.01)
            assert f"node 1 was silent for {seconds} s" in caplog.text
            return
    raise AssertionError(reason)


async def test_tokens_keep_strangers_out(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("# ours\n\nsecret\nolder\n")
    wrong.write_text("guess\n")
    async with rendezvous(cluster__token_file=str(right)) as meeting, asyncio.timeout(WAIT):
        claim = meeting.claim(1)
        for file in (str(wrong), ""):
            message = await meeting.refused(claim, cluster__token_file=file)
            assert message.endswith("does not take the token of cluster.token_file")
        async with meeting.join(claim) as link:
            assert link.reason == ""
            right.write_text("newer\nsecret\n")  # rotated: the first one of a file is shown, all are taken
            assert "joined under this number" in await meeting.refused(claim)


async def test_a_node_waits_for_a_token_that_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    async with rendezvous(cluster__token_file=str(token)) as meeting, asyncio.timeout(WAIT):
        claim, joining = meeting.claim(1), meeting.joining()
        token.unlink()

        async def come() -> str:
            async with joined(joining, hello_of(claim), lambda _: None) as link:
                return link.reason

        coming = asyncio.create_task(come())
        while "cluster.token_file" not in caplog.text:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # it tries more than once
        assert not coming.done() and len(caplog.records) == 1
        token.write_text("secret\n")
        assert await coming == ""


async def test_mutual_tls_keeps_strangers_out(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)

    def shown(name: str) -> dict[str, str]:
        return {
            "cluster__tls_cert": str(files / f"{name}.pem"),
            "cluster__tls_key": str(files / f"{name}.key"),
            "cluster__tls_ca": str(files / "ca.pem"),
        }

    quick = {"cluster__connect_seconds": 1.0}
    async with rendezvous(**shown("server")) as meeting, asyncio.timeout(WAIT):
        claim = meeting.claim(1)
        assert "was not reached" in await meeting.refused(claim, **(shown("stranger") | quick))
        bare = dict.fromkeys(shown("server"), "")
        assert "was not reached" in await meeting.refused(claim, **(bare | quick))
        async with meeting.join(claim, **shown("client")) as link:
            assert link.reason == ""


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_tls_between_nodes_is_mutual_or_not_at_all(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.tls_"):
        config_of(0, **{f"cluster__tls_{name}": "x"})


async def test_port_errors_use_the_names_of_cluster_options(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = NodePlace(0, NODES, "127.0.0.1", int(other.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"cluster\.rendezvous = .*in use"):
            await Leader(config_of(0), place).open(lambda server: None)
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"cluster\.token_file"):
        await Leader(config_of(0, cluster__token_file=missing), place).open(lambda server: None)
    with pytest.raises(ConfigError, match=r"cluster\.token_file"):
        first_token(missing)
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="at least one token"):
        first_token(str(tmp_path / "empty"))


def test_node_0_listens_on_its_own_address_or_on_all() -> None:
    assert [bind_address(host) for host in ("127.0.0.1", "localhost", "::1")] == [
        "127.0.0.1",
        "localhost",
        "::1",
    ]
    everywhere = bind_address("a-name.of.a.service")
    assert everywhere in ("::", "0.0.0.0")
    assert bind_address("198.51.100.7") == everywhere  # not of this host: an address that others see


async def test_a_join_that_is_cancelled_as_a_call_ends_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3,000 joins that nobody answered and that were cancelled, gRPC let 20 go on."""
    waits = asyncio.Event()

    async def first(call: Any) -> AsyncIterator[pb.Bundle]:
        waits.set()
        try:
            await asyncio.sleep(WAIT)
        except asyncio.CancelledError:  # as gRPC does, at that moment
            raise Unavailable("UNAVAILABLE: connection refused") from None
        raise AssertionError("not cancelled")

    monkeypatch.setattr(follower, "_first", first)
    hello = hello_of(claim_of(config_of(1))[0])

    async def join() -> None:
        async with joined(Joining(f"127.0.0.1:{free_port()}", None, tuple, WAIT, 5.0), hello, lambda _: None):
            pass

    async with asyncio.timeout(WAIT):
        joining = asyncio.create_task(join())
        await waits.wait()
        joining.cancel()
        await asyncio.wait((joining,))
    assert joining.cancelled()
