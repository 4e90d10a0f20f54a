"""Calls at a node that does not lead: as at the leader's own port, whatever their end."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ep_server.client import AsyncClient, Output, Target, generate_request
from ep_server.config import GrpcConfig
from ep_server.errors import Draining
from ep_server.nodes.relay import SERVICES
from ep_server.ranks.fake import FakeRanks
from ep_server.v1 import control_pb2 as control
from ep_server.v1 import decode_pb2 as pb
from tests.harness.certificates import make_certificates
from tests.nodes.relay_harness import NODE, RANKS, listening, relayed, relaying
from tests.service.harness import NO_TOKENIZER, WAIT, Code, failure, next_event, rest, trailers

OWN_RANKS = set(range(NODE * RANKS, (NODE + 1) * RANKS))


def shown(output: Output) -> list[dict[str, Any]]:
    """What came of each sequence, without what differs from call to call."""
    output.info.ClearField("rank")
    for one in (output, *output.others):
        one.finished.ClearField("timings")
    parts = (dataclasses.asdict(one) for one in (output, *output.others))
    return [
        {name: part[name] for name in ("info", "token_ids", "text", "logprobs", "finished")} for part in parts
    ]


async def test_a_stream_is_the_leaders() -> None:
    fields: dict[str, Any] = {
        "max_new_tokens": 40,
        "num_sequences": 3,
        "output_logprobs": True,
        "top_n": 2,
        "stop_strings": ["xyz"],
        "request_id": "one",
        "seed": 5,
    }
    async with relayed() as both:
        direct = shown(await both.served.client.complete("hello A", **fields))
        await both.served.idle()
        far = shown(await both.node.client.complete("hello A", **fields))
        assert far == direct and [len(one["token_ids"]) for one in far] == [40, 40, 40]
        await both.served.until(lambda: both.node.heard.ended == ["OK"])


@pytest.mark.parametrize("method", list(SERVICES[1].methods), ids=lambda method: str(method.name))
async def test_every_call_of_control(method: Any) -> None:
    async with relayed() as both:
        request = getattr(control, method.input_type.name)()
        direct = await getattr(both.served.client.control, method.name)(request)
        far = await getattr(both.node.client.control, method.name)(request)
        for answer in (direct, far):
            answer.ClearField("uptime_seconds") if method.name == "GetServerInfo" else None
        assert far == direct and type(far).__name__ == method.output_type.name
    assert both.node.heard.began == 0  # only streams are counted


async def test_refusals_have_the_leaders_words_and_trailers() -> None:
    requests = [
        generate_request([1], temperature=-1.0),
        generate_request([1], dp_rank=17),
        generate_request([1] * 10, max_new_tokens=65527),
        generate_request([1], model="other"),
        pb.GenerateRequest(),
    ]
    async with relayed() as both:
        for request in requests:
            direct = await failure(both.served.client.decode.Generate(request))
            far = await failure(both.node.client.decode.Generate(request))
            assert (far.code(), far.details()) == (direct.code(), direct.details())
            assert trailers(far) == trailers(direct) and "epserver-error" in trailers(far)
        many = control.AbortRequest(request_ids=[str(i) for i in range(1025)])
        direct = await failure(both.served.client.control.Abort(many))
        far = await failure(both.node.client.control.Abort(many))
        assert far.details() == direct.details() and trailers(far) == trailers(direct)
        assert len(both.served.heard.refused) == 2 * len(requests)


async def test_a_full_queue_keeps_its_pushback() -> None:
    async with relayed(scheduler__max_running=1, scheduler__max_queue=0) as both:
        both.ranks.hold()
        calls = [both.node.client.generate([1]) for _ in range(6)]
        for call in calls:
            await next_event(call)
        error = await failure(both.node.client.generate([1]))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "queue full" in (error.details() or "")
        assert int(trailers(error)["grpc-retry-pushback-ms"]) > 0
        for call in calls:
            call.cancel()
        both.ranks.release()


@pytest.mark.parametrize(
    "kind, method", [("unary_stream", "Decode/Generate"), ("unary_unary", "Control/Abort")]
)
async def test_bytes_that_are_no_message(kind: str, method: str) -> None:
    async with relayed() as both:
        call = getattr(both.node.client.channel, kind)(f"/ep_server.v1.{method}")(b"\xff" * 5)
        error = await failure(call)
        assert error.code() is Code.INVALID_ARGUMENT and "'5 bytes'" in (error.details() or "")


async def test_a_method_that_is_not_there() -> None:
    async with relayed() as both:
        for path in ("/ep_server.v1.Decode/Nothing", "/ep_server.v1.rank.Ranks/Join"):
            error = await failure(both.node.client.channel.unary_unary(path)(b""))
            assert error.code() is Code.UNIMPLEMENTED


# -- what a leader sees and says, word for word ----------------------------------------------------------


class Script(grpc.GenericRpcHandler):
    """A leader that keeps the metadata of calls and answers with what a test gave it."""

    def __init__(self, *end: Any) -> None:
        """end: status, details and trailers of every call; none = it ends well."""
        self.end = end
        self.seen: list[dict[str, Any]] = []
        self.remaining: list[float | None] = []

    def service(self, details: Any) -> Any:
        stream = details.method.endswith("/Generate")
        answer = grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
        return answer(self.stream if stream else self.unary, request_deserializer=bytes)

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await self.keep(context)
        yield request + b"1"
        yield b""
        yield request + b"2"

    async def unary(self, request: bytes, context: Any) -> bytes:
        await self.keep(context)
        return request + b"!"

    async def keep(self, context: Any) -> None:
        self.seen.append(dict(context.invocation_metadata()))
        self.remaining.append(context.time_remaining())
        await context.send_initial_metadata((("first", "a"), ("first-bin", b"\x00\xff")))
        if self.end:
            await context.abort(*self.end)
        context.set_trailing_metadata((("last", "b"), ("last-bin", b"\xff\x00")))


@pytest.mark.parametrize("method", ["Decode/Generate", "Control/GetLoads"])
async def test_metadata_both_ways(method: str) -> None:
    script = Script()
    given = [
        ("x-request-id", "r1"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("x-data-parallel-rank", "2"),
        ("some-bin", b"\x00\x01\xfe"),
        ("authorization", "Bearer the caller's"),
        ("epserver-node", "0"),
    ]
    add = lambda server: server.add_generic_rpc_handlers((script,))  # noqa: E731
    async with listening(add) as (_, address), relaying(address, token="the nodes'") as node:
        kind = node.client.channel.unary_stream if "Generate" in method else node.client.channel.unary_unary
        call = kind(f"/ep_server.v1.{method}")(b"m", metadata=given, timeout=50.0)
        answers = [bytes(one) async for one in call] if "Generate" in method else [await call]
        assert answers == ([b"m1", b"", b"m2"] if "Generate" in method else [b"m!"])
        first, last = dict(await call.initial_metadata()), dict(await call.trailing_metadata())
        assert (first["first"], first["first-bin"]) == ("a", b"\x00\xff")
        assert (last["last"], last["last-bin"]) == ("b", b"\xff\x00")
        (seen,) = script.seen
        assert {key: seen[key] for key, _ in given[:4]} == dict(given[:4])
        assert seen["authorization"] == "Bearer the nodes'" and seen["epserver-node"] == str(NODE)
        (remaining,) = script.remaining
        assert remaining is not None and 20 < remaining < 51


async def test_without_a_deadline_there_is_none() -> None:
    script = Script()
    add = lambda server: server.add_generic_rpc_handlers((script,))  # noqa: E731
    async with listening(add) as (_, address), relaying(address) as node:
        await node.client.channel.unary_unary("/ep_server.v1.Control/GetLoads")(b"")
        assert script.remaining == [None] and "authorization" not in script.seen[0]


@pytest.mark.parametrize(
    "status", [code for code in Code if code is not Code.OK], ids=lambda code: str(code.name)
)
@pytest.mark.parametrize("method", ["Decode/Generate", "Control/GetLoads"])
async def test_every_status_is_passed_on_but_those_of_a_broken_connection(status: Any, method: str) -> None:
    def call(node: Any) -> Any:
        channel = node.client.channel
        return (channel.unary_stream if "Generate" in method else channel.unary_unary)(
            f"/ep_server.v1.{method}"
        )

    said = (("epserver-error", "Something"), ("more-bin", b"\xff"))
    for trailers_of_leader in (said, ()):
        script = Script(status, "in its words", trailers_of_leader)
        add = lambda server, of=script: server.add_generic_rpc_handlers((of,))  # noqa: E731
        async with listening(add) as (_, address), relaying(address) as node:
            error = await failure(call(node)(b"m"))
        broken = not trailers_of_leader and status.name in ("CANCELLED", "INTERNAL", "UNAVAILABLE", "UNKNOWN")
        if broken:
            assert error.code() is Code.UNAVAILABLE
            assert error.details() == f"node 0 at {address} cannot be reached: in its words"
        else:
            assert (error.code(), error.details()) == (status, "in its words")
            assert set(trailers_of_leader) <= {(key, value) for key, value in error.trailing_metadata()}


# -- ends ------------------------------------------------------------------------------------------------


async def test_a_caller_that_leaves_frees_its_request() -> None:
    async with relayed() as both:
        call = both.node.client.generate([1], max_new_tokens=50_000)
        for _ in range(3):
            await next_event(call)
        call.cancel()
        await both.served.idle()
        assert [summary.status for summary in both.served.heard.finished] == ["CANCELLED"]
        await both.served.until(lambda: both.node.heard.ended == ["CANCELLED"])
        assert both.node.relay.open_streams == 0


async def test_a_caller_that_loses_its_connection_frees_its_request() -> None:
    async with relayed() as both:
        both.ranks.hold()
        await next_event(both.node.client.generate([1]))
        await both.node.client.close()
        await both.served.until(lambda: both.ranks.cancelled == [1])
        both.ranks.release()


async def test_an_abort_at_any_node_ends_a_stream_of_another() -> None:
    async with relayed() as both:
        both.ranks.hold()
        near, far = (c.generate([1], request_id=name) for c, name in both_clients(both))
        await next_event(near), await next_event(far)
        assert list((await both.node.client.abort("near", "none")).aborted) == ["near"]
        assert list((await both.served.client.abort("far")).aborted) == ["far"]
        for call, name in ((near, "near"), (far, "far")):
            error = await failure(call)
            assert error.code() is Code.CANCELLED
            assert error.details() == f"request '{name}' was aborted"
        both.ranks.release()


def both_clients(both: Any) -> list[tuple[AsyncClient, str]]:
    return [(both.served.client, "near"), (both.node.client, "far")]


async def test_deadlines_of_the_call_and_of_the_request() -> None:
    async with relayed() as both:
        both.ranks.hold()
        for fields in ({"timeout": 0.2}, {"deadline_ms": 200}):
            error = await failure(both.node.client.generate([1], **fields))
            assert error.code() is Code.DEADLINE_EXCEEDED
        await both.served.until(lambda: len(both.served.heard.finished) == 2)
        assert {summary.status for summary in both.served.heard.finished} <= {
            "DEADLINE_EXCEEDED",
            "CANCELLED",
        }
        both.ranks.release()


async def test_a_reader_that_stops_reading_is_cancelled_by_the_leader() -> None:
    """Flow control fills up hop by hop; the tokens then wait at the leader until its buffer is full."""
    async with relayed(grpc__stream_buffer=64, model=NO_TOKENIZER) as both:
        call = both.node.client.generate([1], output_logprobs=True, top_n=20)
        await next_event(call)
        await both.served.until(lambda: both.served.heard.finished != [])
        assert both.served.heard.finished[0].status == "RESOURCE_EXHAUSTED"
        error = await failure(call)
        assert error.code() is Code.RESOURCE_EXHAUSTED and trailers(error)["epserver-error"] == "SlowReader"
        await both.served.until(lambda: both.node.heard.ended == ["RESOURCE_EXHAUSTED"])


async def test_a_lost_rank_ends_relayed_streams_with_the_leaders_message() -> None:
    async with relayed() as both:
        both.ranks.hold()
        call = both.node.client.generate([1])
        await next_event(call)
        both.ranks.kill(4, "exit code -9")
        error = await failure(call)
        assert error.code() is Code.UNAVAILABLE and "rank 4" in (error.details() or "")
        refused = await failure(both.node.client.generate([1]))
        assert refused.code() is Code.UNAVAILABLE and trailers(refused)["epserver-error"] == "RankLost"


async def test_a_draining_leader_refuses_by_its_own_words_and_finishes_streams() -> None:
    async with relayed() as both:
        both.ranks.hold()
        call = both.node.client.generate([1], max_new_tokens=5)
        await next_event(call)
        draining = asyncio.create_task(both.served.server.engine.drain(WAIT))
        await asyncio.sleep(0)
        refused = await failure(both.node.client.generate([1]))
        assert trailers(refused)["epserver-error"] == Draining.__name__
        both.ranks.release()
        assert (await rest(call))[-1].finished.usage.output_tokens == 5
        assert await draining


async def test_a_leader_that_is_not_there() -> None:
    async with relaying("127.0.0.1:1") as node:
        for call in (node.client.generate([1]), node.client.loads()):
            error = await failure(call)
            assert error.code() is Code.UNAVAILABLE
            assert (error.details() or "").startswith("node 0 at 127.0.0.1:1 cannot be reached: ")
            assert trailers(error)["epserver-error"] == "Unavailable"
        assert node.heard.ended == ["UNAVAILABLE"]


async def test_a_leader_that_goes_away_under_a_stream() -> None:
    async with relayed() as both:
        both.ranks.hold()
        call = both.node.client.generate([1])
        await next_event(call)
        await both.for_nodes.stop(None)
        error = await failure(call)
        assert error.code() is Code.UNAVAILABLE and "node 0 at" in (error.details() or "")
        both.ranks.release()


async def test_the_end_of_the_link_ends_calls_and_refuses_new_ones() -> None:
    async with relayed() as both:
        both.ranks.hold()
        call = both.node.client.generate([1])
        await next_event(call)
        both.node.relay.end("node 0 is silent")
        both.node.relay.end("a later word")
        for ended in (call, both.node.client.generate([1]), both.node.client.loads()):
            error = await failure(ended)
            assert (error.code(), error.details()) == (Code.UNAVAILABLE, "node 0 is silent")
        assert both.node.heard.ended == ["UNAVAILABLE"] and both.node.heard.refused == ["UNAVAILABLE"]
        await both.node.relay.closed(WAIT)
        both.ranks.release()
        await both.served.idle()
        assert [summary.status for summary in both.served.heard.finished] == ["CANCELLED"]


async def test_once_the_server_has_ended_calls_in_flight_get_its_last_words() -> None:
    async with relayed() as both:
        both.ranks.hold()
        call = both.node.client.generate([1], max_new_tokens=3)
        await next_event(call)
        both.node.relay.refuse("the server has ended")
        error = await failure(both.node.client.loads())
        assert (error.code(), error.details()) == (Code.UNAVAILABLE, "the server has ended")
        both.ranks.release()
        assert (await rest(call))[-1].finished.usage.output_tokens == 3


async def test_a_leader_of_another_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text("ours\n")
    async with relayed(cluster_token=(str(tmp_path / "token"), "ours")) as both:
        assert (await both.node.client.complete([1], max_new_tokens=1)).token_ids == [2]
    async with relayed(cluster_token=(str(tmp_path / "token"), "theirs")) as both:
        error = await failure(both.node.client.generate([1]))
        assert error.code() is Code.UNAVAILABLE and "does not know this node" in (error.details() or "")
        assert "cluster.token_file of node 1" in caplog.text and both.ranks.requests == {}


# -- the node's own port ---------------------------------------------------------------------------------


async def test_streams_count_against_the_limit_of_the_node() -> None:
    async with relayed(grpc=GrpcConfig(port=0, max_streams=2)) as both:
        both.ranks.hold()
        calls = [both.node.client.generate([1]) for _ in range(2)]
        for call in calls:
            await next_event(call)
        error = await failure(both.node.client.generate([1]))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "grpc.max_streams = 2" in (error.details() or "")
        assert int(trailers(error)["grpc-retry-pushback-ms"]) > 0
        assert (await both.node.client.loads()).in_flight == 2  # other calls go on
        assert both.node.heard.refused == ["RESOURCE_EXHAUSTED"] and both.served.heard.refused == []
        calls[0].cancel()
        await both.served.until(lambda: both.node.relay.open_streams == 1)
        third = both.node.client.generate([1])
        await next_event(third)
        for call in (calls[1], third):
            call.cancel()
        both.ranks.release()


async def test_token_and_tls_are_the_nodes_own(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    (tmp_path / "tokens").write_text("caller\n")
    grpc_config = GrpcConfig(
        port=0,
        tls_cert=str(made / "server.pem"),
        tls_key=str(made / "server.key"),
        token_file=str(tmp_path / "tokens"),
    )
    target = Target("", tls_ca=str(made / "ca.pem"), token="caller")
    async with relayed(grpc=grpc_config, target=target) as both:
        assert (await both.node.client.complete([1], max_new_tokens=1)).token_ids == [2]
        assert await both.node.client.serving()  # probes carry no token
        stranger = dataclasses.replace(both.node.client.target, token="leader")
        async with AsyncClient(stranger) as client:
            for call in (client.generate([1]), client.loads()):
                assert (await failure(call)).code() is Code.UNAUTHENTICATED
        assert len(both.ranks.requests) == 1


async def test_reflection_and_health_answer_here() -> None:
    async with relayed() as both:
        answers = []
        for client in (both.served.client, both.node.client):
            stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
            ask = reflection_pb2.ServerReflectionRequest
            asked = [ask(list_services=""), ask(file_containing_symbol="ep_server.v1.Control")]
            answers.append([answer async for answer in stub.ServerReflectionInfo(iter(asked))])
            assert await client.serving("ep_server.v1.Decode") and await client.serving()
        assert answers[0] == answers[1]


# -- local ranks first -----------------------------------------------------------------------------------


async def test_calls_go_to_the_ranks_of_the_node_they_came_to() -> None:
    async with relayed() as both:
        for _ in range(2):
            assert (await both.node.client.complete([1], max_new_tokens=2)).info.rank in OWN_RANKS
            assert (await both.served.client.complete([1], max_new_tokens=2)).info.rank in {0, 1}
            await both.served.idle()


async def test_many_calls_at_one_node_reach_every_rank() -> None:
    async with relayed() as both:
        both.ranks.hold()
        calls, ranks = [], []
        for _ in range(24):
            calls.append(both.node.client.generate([1] * 100, max_new_tokens=1))
            ranks.append((await next_event(calls[-1])).prompt_info.rank)
        assert {ranks[0], ranks[1]} == OWN_RANKS and set(ranks) == set(range(6))
        assert all(ranks.count(rank) >= 3 for rank in range(6))
        both.ranks.release()
        await asyncio.gather(*map(rest, calls))


async def test_a_wish_reaches_any_rank_of_any_node() -> None:
    async with relayed() as both:
        for rank in range(6):
            assert (await both.node.client.complete([1], max_new_tokens=1, dp_rank=rank)).info.rank == rank


async def test_nobody_claims_to_be_a_node() -> None:
    async with relayed() as both:
        for client, ranks in ((both.served.client, {0, 1}), (both.node.client, OWN_RANKS)):
            for claim in ("2", "99", "x"):
                request = generate_request([1], max_new_tokens=1)
                events = await rest(client.decode.Generate(request, metadata=(("epserver-node", claim),)))
                assert events[0].prompt_info.rank in ranks
                await both.served.idle()


async def test_one_node_takes_the_header_for_nothing() -> None:
    async with relayed(FakeRanks(3), cluster__nodes=1, parallel__ranks=3) as both:
        assert (await both.node.client.complete([1], max_new_tokens=1)).info.rank == 0


async def test_many_streams_at_once_with_some_that_leave() -> None:
    async with relayed() as both:

        async def one(number: int) -> None:
            call = both.node.client.generate([number], max_new_tokens=30, output_text=False)
            if number % 5 == 0:
                await next_event(call)
                call.cancel()
                return
            ids = [i for event in await rest(call) for i in event.tokens.token_ids]
            assert ids == [(number + 1 + i) % 256 for i in range(30)]

        async with asyncio.timeout(WAIT):
            await asyncio.gather(*(one(number) for number in range(1, 121)))
        await both.served.idle()
        await both.node.relay.closed(WAIT)
        assert both.node.heard.began == 120 == len(both.node.heard.ended)
        both.ranks.check_integrity(idle=True)
