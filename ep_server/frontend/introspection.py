"""What generic tools ask of a port: gRPC reflection (v1 and v1alpha) and channelz."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import aio
from grpc_channelz.v1 import channelz
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ep_server.config import GrpcConfig

_ALPHA: str = reflection_pb2.DESCRIPTOR.package
_V1 = "grpc.reflection.v1"
REFLECTION = f"{_V1}.ServerReflection"
CHANNELZ = "grpc.channelz.v1.Channelz"


def add_reflection(server: aio.Server, config: GrpcConfig, names: Iterable[str]) -> None:
    """Adds gRPC reflection of these services, unless it is switched off."""
    if not config.reflection:
        return
    _describe_v1()
    listed = (*names, reflection.SERVICE_NAME, REFLECTION)
    stock: Any = reflection  # its stubs lack `aio`
    stock.enable_server_reflection(listed, server)
    # v1 has the messages of v1alpha under another name, and the same bytes.
    answer: Any = grpc.stream_stream_rpc_method_handler(
        stock.aio.ReflectionServicer(listed).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    v1 = grpc.method_handlers_generic_handler(REFLECTION, {"ServerReflectionInfo": answer})
    server.add_generic_rpc_handlers((v1,))


def add_channelz(server: aio.Server, config: GrpcConfig) -> None:
    """Adds channelz of this process, if it is switched on. It belongs where Control is."""
    if config.channelz:
        add: Any = channelz.add_channelz_servicer  # its stubs want a grpc.Server
        add(server)


def channelz_names(config: GrpcConfig) -> tuple[str, ...]:
    """What add_channelz() serves, for reflection."""
    return (CHANNELZ,) if config.channelz else ()


def _describe_v1() -> None:
    """Adds the proto file of v1 to the pool that reflection reads, unless a package brought it already."""
    pool: Any = descriptor_pool.Default()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        pool.FindFileContainingSymbol(REFLECTION)
    except KeyError:
        alpha = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
        renamed = text_format.MessageToString(alpha).replace(_ALPHA, _V1)
        file = text_format.Parse(renamed, FileDescriptorProto())
        file.name = f"{_V1.replace('.', '/')}/reflection.proto"
        pool.AddSerializedFile(file.SerializeToString())
