"""The client for code with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ep_server.client.failures import Attempts, Retries, error_of
from ep_server.client.requests import chat_prompt, generate_request
from ep_server.client.results import Output, Tokens
from ep_server.client.target import SERVICE, Target
from ep_server.v1 import control_pb2, control_pb2_grpc, decode_pb2, decode_pb2_grpc

T = TypeVar("T")


class AsyncStream(AsyncIterator[Tokens], AbstractAsyncContextManager["AsyncStream"]):
    """One request. Iterate over its tokens, or read() the whole output.

    To cancel the request, close the stream, leave its `async with` block, or drop it: `break` out of a loop.

    output: what has arrived so far, also when the stream ends with an error. unanswered: called once if it
    ends, by an error or by its caller, before anything has arrived: perhaps no rank has got the request.
    """

    def __init__(self, start: Callable[[float | None], Any], attempts: Attempts) -> None:
        """start: begins a call with a timeout."""
        self.output = Output()
        self.unanswered: Callable[[], None] = lambda: None
        self._start = start
        self._attempts = attempts
        self._closed = False
        self._call: Any = None
        self._call = start(attempts.begin())

    def __del__(self) -> None:
        if self._call is not None:
            self._call.cancel()  # gRPC's own references would keep a dropped call alive
            self._check_answered()

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def __anext__(self) -> Tokens:
        """Raises: EpServerError that the server ended the call with."""
        while not self._closed:
            tokens = self.output.add(await self._event())
            if tokens is not None:
                return tokens
        raise StopAsyncIteration

    async def read(self) -> Output:
        """Reads to the end. Raises: EpServerError that the server ended the call with."""
        async for _ in self:
            pass
        return self.output

    async def kv_handle(self) -> decode_pb2.KvHandle:
        """Of a request with hold_kv, before its first token. Raises: EpServerError as while reading."""
        while self.output.kv_handle is None:
            self.output.add(await self._event())
        return self.output.kv_handle

    async def close(self) -> None:
        """Cancels the request unless it has ended. Idempotent."""
        self._closed = True
        self._call.cancel()
        self._check_answered()

    def _check_answered(self) -> None:
        if self.output.info is None:
            unanswered, self.unanswered = self.unanswered, lambda: None
            unanswered()

    async def _event(self) -> Any:
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        while True:
            try:
                event = await self._call.read()
            except asyncio.CancelledError:
                if self._closed and task.cancelling() == cancelled:
                    raise StopAsyncIteration from None  # close() ended the call, nobody cancelled the task
                self._check_answered()
                raise
            except grpc.RpcError as failure:
                if task.cancelling() > cancelled:
                    self._check_answered()
                    raise asyncio.CancelledError from failure  # gRPC loses it if the call ends just then
                error = error_of(failure)
                wait = self._attempts.wait(error) if self.output.info is None else None
                if wait is None:
                    self._check_answered()
                    raise error from failure
            else:
                if event is aio.EOF:  # type: ignore[attr-defined, unused-ignore]
                    raise StopAsyncIteration
                return event
            await asyncio.sleep(wait)
            self._call = self._start(self._attempts.begin())


class AsyncClient(AbstractAsyncContextManager["AsyncClient"]):
    """A connection to a server, for any number of requests in one event loop.

    Close it, or use it in `async with`.

    Every call raises an EpServerError of ep_server.errors that names what went wrong; its cause is the
    grpc.RpcError.
    """

    def __init__(self, target: Target | str, *, retries: Retries | None = None) -> None:
        """target: or host:port. retries: of generate, complete and chat."""
        self.target = Target(target) if isinstance(target, str) else target
        self.retries = retries or Retries()
        credentials, address = self.target.credentials, self.target.address
        if credentials is None:
            self.channel = aio.insecure_channel(address, options=self.target.options)
        else:
            self.channel = aio.secure_channel(address, credentials, options=self.target.options)
        self.decode: Any = decode_pb2_grpc.DecodeStub(self.channel)
        self.control: Any = control_pb2_grpc.ControlStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call and the connection."""
        await self.channel.close(None)

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **fields: Any
    ) -> AsyncStream:
        """Continues a prompt.

        Args:
            prompt: text or token ids.
            timeout: seconds, retries included.
            fields: flat names of decode.proto, for example max_new_tokens=8, json_schema={...}.
        Raises: TypeError for an unknown field, InvalidArgument for a value that it cannot carry.
        """
        request = generate_request(prompt, **fields)
        deadline = request.deadline_ms if request.HasField("deadline_ms") else None

        def start(timeout: float | None) -> Any:
            return self.decode.Generate(request, timeout=timeout, metadata=self.target.metadata)

        return AsyncStream(start, Attempts(self.retries, timeout, deadline))

    async def complete(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **fields: Any
    ) -> Output:
        """As generate(), read to the end."""
        return await self.generate(prompt, timeout=timeout, **fields).read()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> AsyncStream:
        """Answers a conversation, with the chat template of the served checkpoint.

        Args:
            messages: with role, content and what else the template reads.
            tools: as the template expects them. variables: further ones of the template.
            timeout, fields: as for generate().
        """
        return self.generate(chat_prompt(messages, tools, variables), timeout=timeout, **fields)

    async def server_info(self) -> control_pb2.GetServerInfoResponse:
        """Version, state and limits of the server."""
        return await self._control(control_pb2.GetServerInfoResponse)

    async def model_info(self) -> control_pb2.GetModelInfoResponse:
        """Name, sizes and defaults of the model."""
        return await self._control(control_pb2.GetModelInfoResponse)

    async def loads(self) -> control_pb2.GetLoadsResponse:
        """Running and waiting requests, and KV blocks, of each rank."""
        return await self._control(control_pb2.GetLoadsResponse)

    async def ep_state(self) -> control_pb2.GetEpStateResponse:
        """State of the expert-parallel group."""
        return await self._control(control_pb2.GetEpStateResponse)

    async def placement(self) -> control_pb2.GetPlacementResponse:
        """Where experts are, and what they serve."""
        return await self._control(control_pb2.GetPlacementResponse)

    async def diagnostics(self) -> control_pb2.GetDiagnosticsResponse:
        """Configuration, versions and the last steps of every rank."""
        return await self._control(control_pb2.GetDiagnosticsResponse)

    async def abort(self, *request_ids: str) -> control_pb2.AbortResponse:
        """Ends requests."""
        return await self._control(control_pb2.AbortResponse, request_ids=request_ids)

    async def update_weights(self, path: str) -> control_pb2.UpdateWeightsResponse:
        """Replaces the weights by those of another checkpoint with the same shapes."""
        return await self._control(control_pb2.UpdateWeightsResponse, path=path)

    async def scale(self, ranks: int = 0, hold_out: Sequence[int] = ()) -> control_pb2.ScaleResponse:
        """Changes which ranks serve. No stream ends. ranks: how many; 0 = as before."""
        return await self._control(control_pb2.ScaleResponse, ranks=ranks, hold_out=hold_out)

    async def serving(self, service: str = SERVICE, *, timeout: float | None = None) -> bool:
        """Whether a service takes requests now. service: full name; "" asks whether the process works."""
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await self.health.Check(request, timeout=timeout)
        except grpc.RpcError as failure:
            raise error_of(failure) from failure
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _control(self, kind: type[T], **fields: Any) -> T:
        """Makes the call that returns `kind`."""
        method = kind.__name__.removesuffix("Response")
        request = getattr(control_pb2, f"{method}Request")(**fields)
        try:
            response: T = await getattr(self.control, method)(request, metadata=self.target.metadata)
        except grpc.RpcError as failure:
            raise error_of(failure) from failure
        return response
