"""[2] vllm.grpc.engine.VllmEngine: the calls of a gateway, on one port.

Errors reach the interceptor, as in the Decode service.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from ep_server.config import Config
from ep_server.errors import InvalidArgument, SwitchedOff, Unavailable, Unsupported
from ep_server.frontend.doors.vllm_engine import reports
from ep_server.frontend.doors.vllm_engine.kv_events import event_batch
from ep_server.frontend.doors.vllm_engine.kv_transfer import params_of
from ep_server.frontend.doors.vllm_engine.protocol import common, pb, service_grpc
from ep_server.frontend.doors.vllm_engine.requests import NAMES, check_profile, generate_request
from ep_server.frontend.doors.vllm_engine.responses import Responses
from ep_server.frontend.doors.vllm_engine.tokenizer_files import chunks, tokenizer_archive
from ep_server.frontend.generation import Generator, fields_named
from ep_server.frontend.unread import CallEnd, read_in_time

MAX_ABORT = 1024
FLUSH_SECONDS = 30.0
MAX_FLUSH_SECONDS = 600.0


def _refused(why: str) -> Any:
    """A call without a counterpart here; gRPC's own refusal would count as a bug of the server."""

    async def refused(_self: Any, _request: Any, _context: Any) -> NoReturn:
        raise Unsupported(why)

    return refused


class VllmEngineService(service_grpc.VllmEngineServicer):  # type: ignore[misc, name-defined, unused-ignore]
    """Serves one port."""

    def __init__(self, generator: Generator, config: Config) -> None:
        self._generator = generator
        self._engine = generator.engine
        self._config = config
        self._started = time.monotonic()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Streams token ids, or gives all at the end. Raises: every RequestError, Unavailable."""
        end = CallEnd(context)
        messages = self._messages(request, context, end)
        del request  # free the message: the stream may last long
        async for message in read_in_time(messages, self._config.grpc.unread_seconds, end):
            yield message

    async def _messages(self, request: Any, context: Any, end: CallEnd) -> AsyncIterator[Any]:
        with fields_named(NAMES):
            with self._engine.counting_refusals():
                ours = generate_request(request)
            streams = request.stream
            del request
            generation = await self._generator.admit(ours, context, end)
            del ours
        # Runs however the call ends, also when the caller leaves.
        context.add_done_callback(lambda _: generation.close(end.error))
        first, params = generation.requests[0], ""
        if first.hold:
            handoffs = self._generator.handoffs
            params = params_of(await handoffs.handle(first), handoffs.engine_id, first.request_id)
        logprobs = generation.shape.logprobs
        responses = Responses(first.prompt_ids, streams=streams, logprobs=logprobs, kv_params=params)
        async for index, chunk in generation.chunks():
            for message in responses.of(index, chunk):
                yield message

    Embed = _refused("Embed is not supported: the model generates text")

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Whether the server takes requests."""
        return reports.health(self._engine)

    async def Abort(self, request: Any, context: Any) -> Any:
        """Ends requests with CANCELLED; ignores unknown ids. Raises: SwitchedOff, InvalidArgument."""
        self._check_control("Abort")
        given = len(request.request_ids)
        if given > MAX_ABORT:
            raise InvalidArgument("request_ids", f"{given} ids", f"at most {MAX_ABORT}")
        for request_id in dict.fromkeys(request.request_ids):
            self._engine.abort(request_id)
        return pb.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """Limits and defaults of the model."""
        return reports.model_info(self._config, self._engine, self._generator.model)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """State and limits of the server."""
        uptime = time.monotonic() - self._started
        return reports.server_info(self._config, self._engine, uptime, self._generator.handoffs)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        """Load by rank. Raises: Unavailable before the ranks are ready, InvalidArgument."""
        ranks = [ready.rank for ready in self._engine.ready]
        if not ranks:
            raise Unavailable("the server is starting: its ranks are loading weights")
        if request.HasField("dp_rank"):
            if request.dp_rank not in ranks:
                raise InvalidArgument("dp_rank", request.dp_rank, f"0 to {ranks[-1]}")
            ranks = [request.dp_rank]
        return reports.loads(self._config, self._engine, ranks)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Streams a ZIP archive of the tokenizer's files. Raises: NotFound."""
        archive = await tokenizer_archive(self._config.model.path)
        for chunk in chunks(archive):
            yield chunk

    async def FlushCache(self, request: Any, context: Any) -> Any:
        """Forgets all cached prefixes; running requests go on.

        timeout_s: seconds for the ranks to answer, 0 for the default; nothing waits for them to be idle.
        Raises: SwitchedOff, InvalidArgument, Unavailable, DeadlineExceeded.
        """
        self._check_control("FlushCache")
        seconds, name = request.timeout_s, "timeout_s"
        if not 0 <= seconds <= MAX_FLUSH_SECONDS:
            raise InvalidArgument(name, seconds, f"0 to {MAX_FLUSH_SECONDS:g} seconds")
        blocks = await self._engine.flush_cache(seconds or FLUSH_SECONDS)
        return common.FlushCacheResponse(success=True, message=f"{blocks} blocks forgotten")

    async def StartProfile(self, request: Any, context: Any) -> Any:
        """Has every rank write a profile into profile.directory.

        Raises: SwitchedOff, InvalidArgument, WrongState, Unavailable, DeadlineExceeded.
        """
        self._check_control("StartProfile")
        check_profile(request)
        steps = request.num_steps if request.HasField("num_steps") else None
        name = await self._engine.start_profile(steps)
        return common.ProfileResponse(success=True, message=f"profile {name} runs")

    async def StopProfile(self, request: Any, context: Any) -> Any:
        """Ends the profile and names its files.

        Raises: SwitchedOff, WrongState, Unavailable, DeadlineExceeded.
        """
        self._check_control("StopProfile")
        files = await self._engine.stop_profile()
        return common.ProfileResponse(success=True, message="\n".join(files))

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Streams the changes of all ranks' prefix caches. Raises: Unavailable, SlowReader."""
        end = CallEnd(context)
        subscription = self._engine.subscribe_kv_events(request.start_sequence_number)
        context.add_done_callback(lambda _: subscription.close())
        messages = (event_batch(batch) async for batch in subscription)
        async for message in read_in_time(messages, self._config.grpc.unread_seconds, end):
            yield message

    def _check_control(self, name: str) -> None:
        """Raises: SwitchedOff where callers may not act on the requests of others."""
        if self._config.grpc.control != "on":
            why = f"grpc.control = {self._config.grpc.control}"
            raise SwitchedOff(f"{name} is switched off at this server ({why})")
