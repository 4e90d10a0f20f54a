"""[2] inference.GRPCInferenceService: the calls of a Triton client, on one port.

Errors reach the interceptor. Only ModelStreamInfer has messages for those of a single request.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Final, NoReturn

from tritonclient.grpc import service_pb2, service_pb2_grpc

from ep_server.engine.engine import Engine, EngineState
from ep_server.errors import InvalidArgument, QueueFull, Unsupported
from ep_server.frontend.accept_queue import message_arrived
from ep_server.frontend.doors.oip import metadata
from ep_server.frontend.doors.oip.active_inference import ActiveInference
from ep_server.frontend.doors.oip.inference import VERSION, check_model, read_request
from ep_server.frontend.doors.oip.request_stream import RequestStream
from ep_server.frontend.doors.oip.statistics import Statistics
from ep_server.frontend.doors.oip.tensors import SHOWN
from ep_server.frontend.generation import Generator, fields_named
from ep_server.frontend.unread import CallEnd, read_in_time

SERVICE: Final = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
RETRY_MS = 1000


def _refuse(name: str) -> Any:
    """gRPC's own way to refuse a call would count as a bug of the server."""

    async def refused(_self: Any, _request: Any, _context: Any) -> NoReturn:
        raise Unsupported(f"{name} is not supported by this server")

    return refused


class InferenceService(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc, unused-ignore]
    """Serves one port."""

    def __init__(
        self, generator: Generator, statistics: Statistics, unread_seconds: float, max_streams: int
    ) -> None:
        """unread_seconds, max_streams: as in GrpcConfig."""
        self._generator = generator
        self._statistics = statistics
        self._unread_seconds = unread_seconds
        self._max_streams = max_streams
        self._open_streams = 0  # calls of ModelStreamInfer

    async def ServerLive(self, request: Any, context: Any) -> Any:
        """The process works."""
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        """The ranks are ready and the server takes requests."""
        return service_pb2.ServerReadyResponse(ready=self._ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        """As ServerReady, and the model is the one that is served."""
        served = request.name == self._name and request.version in ("", VERSION)
        return service_pb2.ModelReadyResponse(ready=self._ready and served)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Name, version and extensions."""
        return metadata.server_metadata()

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """Tensors of the model. Raises: NotFound."""
        check_model(request.name, request.version, self._name)
        return metadata.model_metadata(self._name)

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        """The model's configuration. Raises: NotFound."""
        check_model(request.name, request.version, self._name)
        return metadata.model_config(self._name)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        """Counts of this protocol's requests. Raises: NotFound."""
        check_model(request.name or self._name, request.version, self._name)
        return self._statistics.message()

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """The one model. Raises: InvalidArgument."""
        if request.repository_name:
            shown = request.repository_name[:SHOWN]
            raise InvalidArgument("repository_name", shown, "absent: there are no named repositories")
        return metadata.repository_index(self._name, ready=self._ready, only_ready=request.ready)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """One request, one response. Raises: every RequestError, Unavailable."""
        end = CallEnd(context)
        active = await self._begin(request, context, end, streaming=False)
        del request  # free the message
        # Runs however the call ends, also when the caller leaves.
        context.add_done_callback(lambda _: active.close(end.error))
        [response] = [response async for response in active.responses()]
        return response

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        """Several requests, several responses each. Raises: QueueFull, MessageTooLarge, InvalidArgument."""
        self._count(context)
        end = CallEnd(context)

        async def begin(request: Any) -> ActiveInference:
            message_arrived()
            return await self._begin(request, context, end, streaming=True)

        stream = RequestStream(begin, ends_on_error=_has(context, "triton_grpc_error", "true"))
        context.add_done_callback(lambda _: stream.close(end.error))
        answers = stream.answers(request_iterator)
        async for answer in read_in_time(answers, self._unread_seconds, end):
            yield answer

    RepositoryModelLoad = _refuse("RepositoryModelLoad")
    RepositoryModelUnload = _refuse("RepositoryModelUnload")
    SystemSharedMemoryStatus = _refuse("SystemSharedMemoryStatus")
    SystemSharedMemoryRegister = _refuse("SystemSharedMemoryRegister")
    SystemSharedMemoryUnregister = _refuse("SystemSharedMemoryUnregister")
    CudaSharedMemoryStatus = _refuse("CudaSharedMemoryStatus")
    CudaSharedMemoryRegister = _refuse("CudaSharedMemoryRegister")
    CudaSharedMemoryUnregister = _refuse("CudaSharedMemoryUnregister")
    TraceSetting = _refuse("TraceSetting")
    LogSettings = _refuse("LogSettings")

    async def _begin(self, request: Any, context: Any, end: CallEnd, *, streaming: bool) -> ActiveInference:
        generator, started = self._generator, time.monotonic()
        try:
            with generator.engine.counting_refusals():
                inference = read_request(request, generator.model, generator.limits.max_context)
                if inference.streams and not streaming:
                    allowed = "false in ModelInfer, which has one response; call ModelStreamInfer"
                    raise InvalidArgument("stream", True, allowed)
            with fields_named(inference.names):
                generation = await generator.admit(inference.generate, context, end)
        except BaseException:
            self._statistics.failed(started)
            raise
        return ActiveInference(inference, generation, generator.model.tokenizer, self._statistics, started)

    def _count(self, context: Any) -> None:
        """Counts a stream until it is over. Raises: QueueFull."""
        if self._open_streams >= self._max_streams:
            full = f"{self._open_streams} open calls, the limit is grpc.max_streams = {self._max_streams}"
            raise QueueFull(full, RETRY_MS)
        self._open_streams += 1

        def over(_context: Any) -> None:
            self._open_streams -= 1

        context.add_done_callback(over)

    @property
    def _name(self) -> str:
        return self._generator.model.name

    @property
    def _ready(self) -> bool:
        engine: Engine = self._generator.engine
        return engine.state in (EngineState.SERVING, EngineState.RECOVERING)  # meanwhile requests wait


def _has(context: Any, key: str, value: str) -> bool:
    return (key, value) in tuple(context.invocation_metadata() or ())
