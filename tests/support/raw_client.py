"""The stubs of a server with as little around them as possible: protobuf messages and gRPC errors.

For tests of the server. ep_server.client has retries, results and errors of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ep_server.client import SERVICE, Target, generate_request
from ep_server.v1 import control_pb2, control_pb2_grpc, decode_pb2_grpc


@dataclass(slots=True)
class Output:
    """All events of one stream, put together. `finished` is set where the output is complete.

    others: sequences 1 and up of a request with num_sequences; the rest is sequence 0.
    """

    info: Any = None
    kv_handle: Any = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    messages: int = 0  # tokens events
    finished: Any = None
    others: list[Output] = field(default_factory=list)

    def add(self, event: Any) -> None:
        """Adds one GenerateResponse."""
        kind = event.WhichOneof("event")
        if kind == "prompt_info":
            self.info = event.prompt_info
        elif kind == "kv_handle":
            self.kv_handle = event.kv_handle
        elif kind == "tokens":
            output = self._of(event.tokens.index)
            output.messages += 1
            output.token_ids += event.tokens.token_ids
            output.text += event.tokens.text
            output.logprobs += event.tokens.logprobs
        elif kind == "prompt_logprobs":
            self.prompt_logprobs += event.prompt_logprobs.logprobs
        else:
            self._of(event.finished.index).finished = event.finished

    def _of(self, index: int) -> Output:
        while len(self.others) < index:
            self.others.append(Output(self.info))
        return self.others[index - 1] if index else self


class RawClient:
    """Close it, or use it in `async with`."""

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
