"""[2] The Decode service: takes a request, streams its events.

It contains no `except`: errors reach the interceptor. A stream ends once, with `finished` or with a status.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

from ep_server.engine.engine import Engine
from ep_server.engine.stream import Chunk, Completion
from ep_server.frontend import requests
from ep_server.frontend.generation import Generator, limits_of
from ep_server.frontend.messages import Method, field_counts
from ep_server.frontend.requests import ResponseShape
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.unread import CallEnd, read_in_time
from ep_server.records import FinishReason, PromptLogprobs, Request, TokenEvent
from ep_server.v1 import decode_pb2, decode_pb2_grpc

SERVICE_NAME: str = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name
GENERATE = f"/{SERVICE_NAME}/Generate"

_REASONS = {
    FinishReason.EOS: decode_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: decode_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: decode_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: decode_pb2.FINISH_REASON_LENGTH,
}


class DecodeService(decode_pb2_grpc.DecodeServicer):  # type: ignore[misc, unused-ignore]
    """ep_server.v1.Decode, on one port."""

    def __init__(self, generator: Generator, unread_seconds: float) -> None:
        """unread_seconds: as in GrpcConfig."""
        self._generator = generator
        self._unread_seconds = unread_seconds

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Streams the events of one request. Raises: every RequestError, Unavailable."""
        end = CallEnd(context)
        events = self._events(request, context, end)
        del request  # free the message: the stream may last long
        async for event in read_in_time(events, self._unread_seconds, end):
            yield event

    async def ReleaseKv(self, request: Any, context: Any) -> Any:
        """Frees blocks held for another server. Raises: InvalidArgument, Unavailable, DeadlineExceeded."""
        return decode_pb2.ReleaseKvResponse(blocks=await self._generator.handoffs.release(request.key))

    async def _events(self, request: Any, context: Any, end: CallEnd) -> AsyncIterator[Any]:
        generation = await self._generator.admit(request, context, end)
        del request  # free it
        # Runs however the call ends, also when the caller leaves.
        context.add_done_callback(lambda _: generation.close(end.error))
        first = generation.requests[0]
        yield _prompt_info(first, self._generator.model)
        if first.hold:
            handle = await self._generator.handoffs.handle(first)
            yield decode_pb2.GenerateResponse(kv_handle=handle)
        async for index, chunk in generation.chunks():
            for scored in chunk.prompt:
                yield _prompt_logprobs(scored)
            if chunk.events:
                yield _tokens(index, chunk, generation.shape)
            if chunk.completion is not None:
                yield _finished(index, chunk.completion, len(first.prompt_ids))


def generate_method(engine: Engine, model: ServedModel, max_bytes: int) -> Method:
    """Limits of Generate that apply before its message is decoded."""

    def check(data: bytes) -> None:
        most = requests.most_elements(model, limits_of(engine))
        requests.check_counts(field_counts(data, decode_pb2.GenerateRequest.DESCRIPTOR, most), most)

    return Method(max_bytes, engine.check_room, check)


def _prompt_info(request: Request, model: ServedModel) -> Any:
    info = decode_pb2.PromptInfo(
        request_id=request.request_id,
        model=model.name,
        prompt_tokens=len(request.prompt_ids),
        rank=request.dp_rank,
        seed=request.sampling.seed,
    )
    return decode_pb2.GenerateResponse(prompt_info=info)


def _prompt_logprobs(scored: PromptLogprobs) -> Any:
    found = zip(scored.top_ids, scored.top_logprobs, strict=True)
    parts = decode_pb2.PromptLogprobs(start=scored.start)
    for logprob in scored.logprobs:
        candidates = [decode_pb2.Candidate(token_id=t, logprob=p) for t, p in islice(found, scored.top)]
        parts.logprobs.append(decode_pb2.TokenLogprob(logprob=logprob, top=candidates))
    return decode_pb2.GenerateResponse(prompt_logprobs=parts)


def _tokens(index: int, chunk: Chunk, shape: ResponseShape) -> Any:
    last = chunk.events[-1]
    tokens = decode_pb2.Tokens(index=index, step=last.step, weights_version=last.weights, rank=chunk.rank)
    if chunk.events[0].weights != last.weights:
        tokens.tokens_of_earlier_weights = sum(event.weights < last.weights for event in chunk.events)
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
