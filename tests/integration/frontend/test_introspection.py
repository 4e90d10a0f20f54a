"""Reflection and channelz, asked by the clients that their packages bring."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.support.frontend import WAIT, Code, Served, serving
from tests.support.ports import free_port

CHANNELZ = "grpc.channelz.v1.Channelz"
V1 = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


def generate_by_reflection(address: str) -> list[str]:
    """As grpcurl does: knows the address alone. Returns: services, then the tokens of a call."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        services = list(database.get_services())
        for name in services:
            assert pool.FindServiceByName(name).full_name == name
        method = pool.FindServiceByName("ep_server.v1.Decode").methods_by_name["Generate"]
        ask, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        call = channel.unary_stream("/ep_server.v1.Decode/Generate", ask.SerializeToString, answer.FromString)
        request = ask(token_ids={"ids": [1, 2]}, stopping={"max_new_tokens": 2})
        drawn = [token for event in call(request, timeout=WAIT) for token in event.tokens.token_ids]
    return [*sorted(services), *map(str, drawn)]


async def test_a_client_needs_only_reflection() -> None:
    async with serving() as served:
        found = await asyncio.to_thread(generate_by_reflection, served.server.address)
        assert found == [
            "ep_server.v1.Control",
            "ep_server.v1.Decode",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
            "inference.GRPCInferenceService",
            "vllm.grpc.engine.VllmEngine",
            *("3", "4"),
        ]


async def reflect(channel: aio.Channel, **asked: Any) -> Any:
    """A call of v1 by hand; its messages have the bytes of v1alpha."""
    ask, answer = reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse
    call: Any = channel.stream_stream(V1, ask.SerializeToString, answer.FromString)
    (only,) = [each async for each in call(iter([ask(**asked)]), timeout=WAIT)]
    return only


async def test_reflection_v1() -> None:
    async with serving() as served:
        channel = served.client.channel
        listed = await reflect(channel, list_services="")
        assert len(listed.list_services_response.service) == 7
        found = await reflect(channel, file_containing_symbol="grpc.reflection.v1.ServerReflection")
        (file,) = found.file_descriptor_response.file_descriptor_proto
        described = FileDescriptorProto.FromString(file)
        assert (described.package, described.name) == (
            "grpc.reflection.v1",
            "grpc/reflection/v1/reflection.proto",
        )
        unknown = await reflect(channel, file_containing_symbol="no.such.Symbol")
        assert unknown.error_response.error_code == Code.NOT_FOUND.value[0]
    async with serving(grpc__reflection=False) as served:
        refused: Any = served.client.channel.stream_stream(V1)()
        assert await refused.code() is Code.UNIMPLEMENTED


async def servers(channel: aio.Channel) -> list[Any]:
    stub: Any = channelz_pb2_grpc.ChannelzStub(channel)
    answer = await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=WAIT)
    return list(answer.server)


async def test_channelz_counts_calls() -> None:
    async with serving(grpc__channelz=True) as served:
        before = max(one.data.calls_started for one in await servers(served.client.channel))
        await served.client.complete([1], max_new_tokens=1)
        after = max(one.data.calls_started for one in await servers(served.client.channel))
        assert after == before + 2  # one of them this one
        listed = await reflect(served.client.channel, list_services="")
        assert CHANNELZ in {service.name for service in listed.list_services_response.service}


async def refused(served: Served) -> Any:
    with pytest.raises(aio.AioRpcError) as raised:
        await servers(served.client.channel)
    return raised.value.code()


async def test_channelz_is_where_control_is() -> None:
    port = free_port()
    where = {"grpc__control": "loopback", "grpc__control_port": port}
    async with serving() as served:
        assert await refused(served) is Code.UNIMPLEMENTED
    async with serving(grpc__channelz=True, grpc__control="off") as served:
        assert await refused(served) is Code.UNIMPLEMENTED
    async with serving(grpc__channelz=True, **where) as served:
        assert await refused(served) is Code.UNIMPLEMENTED
        async with aio.insecure_channel(f"127.0.0.1:{port}") as own:
            assert await servers(own)


async def test_channelz_needs_a_token(tmp_path: Any) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    async with serving(grpc__channelz=True, grpc__token_file=str(tmp_path / "tokens")) as served:
        assert await refused(served) is Code.UNAUTHENTICATED
