"""[2] The Decode service: takes a request, streams its events.

It contains no `except`: errors reach the interceptor. A stream ends once, with `finished` or with a status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ep_server.engine.active_request import Submission
from ep_server.engine.engine import Engine
from ep_server.engine.stream import Chunk, Completion, merged
from ep_server.errors import InvalidArgument
from ep_server.frontend import requests
from ep_server.frontend.accept_queue import seconds_since_arrival
from ep_server.frontend.call_metadata import CallMetadata, Entrance
from ep_server.frontend.messages import Method, field_counts
from ep_server.frontend.requests import Limits, ResponseShape
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.unread import CallEnd, read_in_time
from ep_server.records import FinishReason, Request, TokenEvent
from ep_server.v1 import decode_pb2, decode_pb2_grpc

SERVICE_NAME: str = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name
GENERATE = f"/{SERVICE_NAME}/Generate"
LONG_TEXT = 4096  # characters; longer prompts are encoded outside the event loop
LONG_TEXTS = 4  # encoded at once

_REASONS = {
    FinishReason.EOS: decode_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: decode_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: decode_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: decode_pb2.FINISH_REASON_LENGTH,
}


class DecodeService(decode_pb2_grpc.DecodeServicer):  # type: ignore[misc, unused-ignore]
    """ep_server.v1.Decode, on one port."""

    def __init__(
        self, engine: Engine, model: ServedModel, unread_seconds: float, entrance: Entrance | None = None
    ) -> None:
        """unread_seconds: as in GrpcConfig. entrance: of the port; None where all ranks are alike."""
        self._engine = engine
        self._model = model
        self._unread_seconds = unread_seconds
        self._entrance = entrance or Entrance()
        self._long_texts = asyncio.Semaphore(LONG_TEXTS)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Streams the events of one request. Raises: every RequestError, Unavailable."""
        end = CallEnd(context)
        events = self._events(request, context, end)
        del request  # free the message: the stream may last long
        async for event in read_in_time(events, self._unread_seconds, end):
            yield event

    async def _events(self, request: Any, context: Any, end: CallEnd) -> AsyncIterator[Any]:
        with self._engine.counting_refusals():
            sequences, shape = await self._sequences(request, context, end)
            del request  # free it
            admitted, streams = zip(*self._engine.submit(sequences), strict=True)
        # Runs however the call ends, also when the caller leaves.
        context.add_done_callback(lambda _: [stream.close(end.error) for stream in streams])
        yield _prompt_info(admitted[0], self._model)
        async for index, chunk in merged(streams):
            if chunk.events:
                yield _tokens(index, chunk, shape)
            if chunk.completion is not None:
                yield _finished(index, chunk.completion, len(admitted[0].prompt_ids))

    async def _sequences(
        self, request: Any, context: Any, end: CallEnd
    ) -> tuple[list[Submission], ResponseShape]:
        limits = _limits(self._engine)
        requests.check_counts(requests.counts(request), requests.most_elements(self._model, limits))
        pairs = context.invocation_metadata() or ()
        metadata, near = CallMetadata.of(pairs), self._entrance.near(pairs)
        timeout = requests.timeout_seconds(request, seconds_since_arrival(), context.time_remaining())
        # Before the prompt is encoded: under overload most calls end here.
        self._engine.check_room(requests.asked(request, metadata, timeout, limits))
        prompt_ids = await self._prompt_ids(request, limits)
        timeout = requests.timeout_seconds(request, seconds_since_arrival(), context.time_remaining())
        built = requests.build(request, metadata, prompt_ids, self._model, limits)
        shape = requests.response_shape(request, self._model)
        sequences = [
            Submission(
                sequence,
                requests.output_text(sequence, shape, self._model),
                shape.interval,
                timeout,
                metadata.traceparent,
                near,
                end,
            )
            for sequence in requests.sequences(request, built)
        ]
        return sequences, shape

    async def _prompt_ids(self, request: Any, limits: Limits) -> Sequence[int]:
        if request.WhichOneof("prompt") != "text":
            ids: Sequence[int] = request.token_ids.ids
            return tuple(ids)
        tokenizer, text = self._model.tokenizer, request.text
        if tokenizer is None:
            shown = text[: requests.SHOWN]
            raise InvalidArgument("text", shown, "absent: this model has no tokenizer; send token_ids")
        requests.check_text(text, limits)
        if len(text) > LONG_TEXT:
            async with self._long_texts:
                return await asyncio.to_thread(tokenizer.encode, text)
        return tokenizer.encode(text)


def generate_method(engine: Engine, model: ServedModel, max_bytes: int) -> Method:
    """Limits of Generate that apply before its message is decoded."""

    def check(data: bytes) -> None:
        most = requests.most_elements(model, _limits(engine))
        requests.check_counts(field_counts(data, decode_pb2.GenerateRequest.DESCRIPTOR, most), most)

    return Method(max_bytes, engine.check_room, check)


def _limits(engine: Engine) -> Limits:
    return Limits(max_context=engine.max_context, num_ranks=engine.num_ranks)


def _prompt_info(request: Request, model: ServedModel) -> Any:
    info = decode_pb2.PromptInfo(
        request_id=request.request_id,
        model=model.name,
        prompt_tokens=len(request.prompt_ids),
        rank=request.dp_rank,
        seed=request.sampling.seed,
    )
    return decode_pb2.GenerateResponse(prompt_info=info)


def _tokens(index: int, chunk: Chunk, shape: ResponseShape) -> Any:
    tokens = decode_pb2.Tokens(index=index)
    if shape.token_ids:
        tokens.token_ids.extend([event.token_id for event in chunk.events])
    if shape.text:
        tokens.text = chunk.text
    if shape.logprobs:
        tokens.logprobs.extend([_logprob(event) for event in chunk.events])
    return decode_pb2.GenerateResponse(tokens=tokens)


def _logprob(event: TokenEvent) -> Any:
    top = [decode_pb2.Candidate(token_id=token, logprob=logprob) for token, logprob in event.top]
    return decode_pb2.TokenLogprob(logprob=event.logprob or 0.0, top=top)


def _finished(index: int, completion: Completion, prompt_tokens: int) -> Any:
    finished = decode_pb2.Finished(
        index=index,
        reason=_REASONS[completion.reason],
        usage=decode_pb2.Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=completion.cached_tokens,
            output_tokens=completion.output_tokens,
        ),
        timings=decode_pb2.Timings(
            first_token_seconds=completion.first_token_seconds,
            total_seconds=completion.total_seconds,
            max_token_gap_seconds=completion.max_gap_seconds,
            queued_seconds=completion.queued_seconds,
            prefill_seconds=completion.first_token_seconds - completion.queued_seconds,
        ),
    )
    if isinstance(completion.match, str):
        finished.stop_string = completion.match
    elif completion.match is not None:
        finished.token_id = completion.match
    return decode_pb2.GenerateResponse(finished=finished)
