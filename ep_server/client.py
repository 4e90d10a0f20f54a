"""A small client of the gRPC services, async and sync.

    with Client("127.0.0.1:50051") as client:
        print(client.complete("2 + 3 =", max_new_tokens=8).text)

Fields of a request are flat keywords with the names of decode.proto. Errors are grpc.RpcError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.descriptor import FieldDescriptor
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ep_server.errors import InvalidArgument
from ep_server.v1 import control_pb2, control_pb2_grpc, decode_pb2, decode_pb2_grpc

SERVICE: str = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name
_PARTS: dict[str, str] = {
    name: part
    for part, message in (
        ("sampling", decode_pb2.Sampling),
        ("stopping", decode_pb2.Stopping),
        ("response", decode_pb2.ResponseOptions),
    )
    for name in message.DESCRIPTOR.fields_by_name
}
# What a field can carry at all, by its type on the wire.
_CARRIED: dict[int, str] = {
    FieldDescriptor.CPPTYPE_UINT32: f"whole numbers, 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"whole numbers, 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_INT32: f"whole numbers, {-(2**31)} to {2**31 - 1}",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_STRING: "valid UTF-8 text",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
}
SHOWN = 80  # characters of a value that an error message repeats


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is and how to reach it. TLS is used where tls_ca is given; paths are PEM files.

    keepalive_seconds: from the server's last byte to a ping, while calls are open; 0 = no pings. The server
        takes a ping every 5 s; proxies may take fewer.
    keepalive_timeout_seconds: for the answer to a ping; without it calls end with UNAVAILABLE.
    """

    address: str
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token: str = ""
    keepalive_seconds: float = 10.0
    keepalive_timeout_seconds: float = 10.0

    @property
    def options(self) -> list[tuple[str, int]]:
        """Channel options."""
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        if not self.keepalive_seconds:
            return unlimited
        timeout = round(1000 * self.keepalive_timeout_seconds)
        return [
            *unlimited,
            ("grpc.keepalive_time_ms", round(1000 * self.keepalive_seconds)),
            ("grpc.keepalive_timeout_ms", timeout),
            (
                "grpc.http2.ping_timeout_ms",
                timeout,
            ),  # of pings that gRPC sends itself, which delay others
            ("grpc.http2.max_pings_without_data", 0),  # a long prefill sends nothing; 0 = any number
        ]

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What every call carries."""
        return [("authorization", f"Bearer {self.token}")] if self.token else []

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """None for a plain connection. Raises: OSError for an unreadable file."""
        if not self.tls_ca:
            return None
        key, cert = (Path(path).read_bytes() if path else None for path in (self.tls_key, self.tls_cert))
        return grpc.ssl_channel_credentials(Path(self.tls_ca).read_bytes(), key, cert)


@dataclass(slots=True)
class Output:
    """All events of one stream, put together. `finished` is set where the output is complete.

    others: sequences 1 and up of a request with num_sequences; the rest is sequence 0.
    """

    info: Any = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    messages: int = 0  # tokens events
    finished: Any = None
    others: list[Output] = field(default_factory=list)

    def add(self, event: Any) -> None:
        """Adds one GenerateResponse."""
        kind = event.WhichOneof("event")
        if kind == "prompt_info":
            self.info = event.prompt_info
        elif kind == "tokens":
            output = self._of(event.tokens.index)
            output.messages += 1
            output.token_ids += event.tokens.token_ids
            output.text += event.tokens.text
            output.logprobs += event.tokens.logprobs
        else:
            self._of(event.finished.index).finished = event.finished

    def _of(self, index: int) -> Output:
        while len(self.others) < index:
            self.others.append(Output(self.info))
        return self.others[index - 1] if index else self


def generate_request(prompt: str | Sequence[int], **fields: Any) -> Any:
    """A GenerateRequest. fields: flat names of decode.proto; None means "not given".

    Raises: TypeError for a name that the contract does not have, InvalidArgument for a value that the field
        cannot carry; other bad values are the server's to refuse.
    """
    request = decode_pb2.GenerateRequest()
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    else:
        request.token_ids.SetInParent()
        _set(request.token_ids, "ids", list(prompt))
    for name, value in fields.items():
        if value is None:
            continue
        message = getattr(request, _PARTS[name]) if name in _PARTS else request
        if name not in message.DESCRIPTOR.fields_by_name:
            raise TypeError(f"{name!r} is not a field of a request")
        _set(message, name, value)
    return request


def _set(message: Any, name: str, value: Any) -> None:
    try:
        if isinstance(value, dict):
            getattr(message, name).update(value)
        elif isinstance(value, (list, tuple)):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError):
        field = message.DESCRIPTOR.fields_by_name[name]
        shown = value if len(repr(value)) <= SHOWN else f"{repr(value)[:SHOWN]}..."
        raise InvalidArgument(name, shown, _CARRIED.get(field.cpp_type, "as in decode.proto")) from None


class AsyncClient:
    """For code with an event loop. Close it, or use it in `async with`."""

    def __init__(self, target: Target | str) -> None:
        self.target = Target(target) if isinstance(target, str) else target
        credentials, address = self.target.credentials, self.target.address
        if credentials is None:
            self.channel = aio.insecure_channel(address, options=self.target.options)
        else:
            self.channel = aio.secure_channel(address, credentials, options=self.target.options)
        self.decode: Any = decode_pb2_grpc.DecodeStub(self.channel)
        self.control: Any = control_pb2_grpc.ControlStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call and the connection."""
        await self.channel.close(None)

    def generate(self, prompt: str | Sequence[int], *, timeout: float | None = None, **fields: Any) -> Any:
        """A call whose `async for` gives GenerateResponse; `cancel()` ends the request. timeout: seconds."""
        request = generate_request(prompt, **fields)
        return self.decode.Generate(request, timeout=timeout, metadata=self.target.metadata)

    async def complete(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **fields: Any
    ) -> Output:
        """Reads a whole stream."""
        output = Output()
        async for event in self.generate(prompt, timeout=timeout, **fields):
            output.add(event)
        return output

    async def server_info(self) -> Any:
        """GetServerInfoResponse."""
        request = control_pb2.GetServerInfoRequest()
        return await self.control.GetServerInfo(request, metadata=self.target.metadata)

    async def model_info(self) -> Any:
        """GetModelInfoResponse."""
        request = control_pb2.GetModelInfoRequest()
        return await self.control.GetModelInfo(request, metadata=self.target.metadata)

    async def loads(self) -> Any:
        """GetLoadsResponse."""
        return await self.control.GetLoads(control_pb2.GetLoadsRequest(), metadata=self.target.metadata)

    async def ep_state(self) -> Any:
        """GetEpStateResponse."""
        return await self.control.GetEpState(control_pb2.GetEpStateRequest(), metadata=self.target.metadata)

    async def diagnostics(self) -> Any:
        """GetDiagnosticsResponse."""
        request = control_pb2.GetDiagnosticsRequest()
        return await self.control.GetDiagnostics(request, metadata=self.target.metadata)

    async def abort(self, *request_ids: str) -> Any:
        """AbortResponse."""
        request = control_pb2.AbortRequest(request_ids=request_ids)
        return await self.control.Abort(request, metadata=self.target.metadata)

    async def serving(self, service: str = SERVICE, *, timeout: float | None = None) -> bool:
        """Whether a service takes requests now. service: full name; "" asks whether the process works."""
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Client:
    """For code without an event loop. Close it, or use it in `with`."""

    def __init__(self, target: Target | str) -> None:
        self.target = Target(target) if isinstance(target, str) else target
        credentials, address = self.target.credentials, self.target.address
        if credentials is None:
            self.channel = grpc.insecure_channel(address, options=self.target.options)
        else:
            self.channel = grpc.secure_channel(address, credentials, options=self.target.options)
        self.decode: Any = decode_pb2_grpc.DecodeStub(self.channel)
        self.control: Any = control_pb2_grpc.ControlStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call and the connection."""
        self.channel.close()

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **fields: Any
    ) -> Iterator[Any]:
        """GenerateResponse events, as they arrive. timeout: seconds."""
        request = generate_request(prompt, **fields)
        call: Iterator[Any] = self.decode.Generate(request, timeout=timeout, metadata=self.target.metadata)
        return call

    def complete(self, prompt: str | Sequence[int], *, timeout: float | None = None, **fields: Any) -> Output:
        """Reads a whole stream."""
        output = Output()
        for event in self.generate(prompt, timeout=timeout, **fields):
            output.add(event)
        return output

    def server_info(self) -> Any:
        """GetServerInfoResponse."""
        request = control_pb2.GetServerInfoRequest()
        return self.control.GetServerInfo(request, metadata=self.target.metadata)

    def model_info(self) -> Any:
        """GetModelInfoResponse."""
        return self.control.GetModelInfo(control_pb2.GetModelInfoRequest(), metadata=self.target.metadata)

    def loads(self) -> Any:
        """GetLoadsResponse."""
        return self.control.GetLoads(control_pb2.GetLoadsRequest(), metadata=self.target.metadata)

    def ep_state(self) -> Any:
        """GetEpStateResponse."""
        return self.control.GetEpState(control_pb2.GetEpStateRequest(), metadata=self.target.metadata)

    def diagnostics(self) -> Any:
        """GetDiagnosticsResponse."""
        request = control_pb2.GetDiagnosticsRequest()
        return self.control.GetDiagnostics(request, metadata=self.target.metadata)

    def abort(self, *request_ids: str) -> Any:
        """AbortResponse."""
        request = control_pb2.AbortRequest(request_ids=request_ids)
        return self.control.Abort(request, metadata=self.target.metadata)

    def serving(self, service: str = SERVICE, *, timeout: float | None = None) -> bool:
        """Whether a service takes requests now. service: full name; "" asks whether the process works."""
        answer = self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
