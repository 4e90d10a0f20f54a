"""Calls at a node that does not lead: as at the leader's own port, word for word."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from ep_server.client import generate_request
from ep_server.cluster.relay import SERVICES
from ep_server.v1 import control_pb2 as control
from ep_server.v1 import decode_pb2 as pb
from tests.support.cluster.relay import NODE, listening, relayed, relaying
from tests.support.frontend import Code, failure, next_event, trailers
from tests.support.raw_client import Output


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


REFUSED = {"UpdateWeights", "Scale"}  # without a folder; by ranks that are fakes
ANSWERED = [method for method in SERVICES[1].methods if method.name not in REFUSED]


@pytest.mark.parametrize("method", ANSWERED, ids=lambda method: str(method.name))
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
        direct = await failure(both.served.client.control.UpdateWeights(control.UpdateWeightsRequest()))
        far = await failure(both.node.client.control.UpdateWeights(control.UpdateWeightsRequest()))
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
async def test_relay_passes_every_status_except_connection_errors(status: Any, method: str) -> None:
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
        assert node.heard.ended == [error.code().name] * ("Generate" in method)  # what the caller was told
        if broken:
            assert error.code() is Code.UNAVAILABLE
            assert error.details() == f"node 0 at {address} cannot be reached: in its words"
        else:
            assert (error.code(), error.details()) == (status, "in its words")
            assert set(trailers_of_leader) <= {(key, value) for key, value in error.trailing_metadata()}
