"""[2] Admits a GenerateRequest and yields what its sequences produce. Every door generates through this.

A door turns its own message into a GenerateRequest, so that one place checks every field.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ep_server.engine.active_request import Submission
from ep_server.engine.engine import Engine
from ep_server.engine.stream import Chunk, TokenStream, merged
from ep_server.errors import ContextLengthExceeded, EpServerError, InvalidArgument
from ep_server.frontend import chat, requests
from ep_server.frontend.accept_queue import seconds_since_arrival
from ep_server.frontend.call_metadata import CallMetadata, Entrance
from ep_server.frontend.handoffs import Handoffs
from ep_server.frontend.requests import Limits, ResponseShape
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.unread import CallEnd
from ep_server.records import Request
from ep_server.text.grammars.compiler import GrammarCompiler

log = logging.getLogger(__name__)

LONG_TEXT = 4096  # characters; longer prompts are encoded outside the event loop
LONG_TEXTS = 4  # encoded at once


@dataclass(frozen=True, slots=True)
class Generation:
    """An admitted request. requests: one per sequence. Whoever holds it calls close()."""

    requests: Sequence[Request]
    shape: ResponseShape
    streams: Sequence[TokenStream]

    def chunks(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Yields (sequence, chunk) in order of arrival until all sequences completed.

        Log probabilities of the prompt are in chunks of sequence 0, before any token.
        Raises: the error that one of them ended with.
        """
        scores = self.requests[0].sampling.prompt_logprobs is not None
        return merged(self.streams, prompt=scores)

    def close(self, error: EpServerError | None = None) -> None:
        """Cancels what still runs. error: why the server ends the call. Idempotent."""
        for stream in self.streams:
            stream.close(error)


class Generator:
    """Admits the requests of one port. Used in one event loop."""

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        grammars: GrammarCompiler,
        handoffs: Handoffs,
        entrance: Entrance | None = None,
    ) -> None:
        """entrance: of the port; None where all ranks are alike."""
        self.handoffs = handoffs
        self.engine = engine
        self.model = model
        self._grammars = grammars
        self._entrance = entrance or Entrance()
        self._long_texts = asyncio.Semaphore(LONG_TEXTS)

    @property
    def limits(self) -> Limits:
        """Limits of a request."""
        return limits_of(self.engine)

    async def admit(self, request: Any, context: Any, end: CallEnd) -> Generation:
        """Checks a GenerateRequest and gives it to a rank.

        Args:
            context: of the call, for its metadata and deadline.
            end: ends the call if its caller does not read.
        Raises: every RequestError, Unavailable.
        """
        name = request.request_id[: requests.SHOWN]
        try:
            with self.engine.counting_refusals():
                sequences, shape = await self._sequences(request, context, end)
                admitted, streams = zip(*self.engine.submit(sequences), strict=True)
        except EpServerError as error:
            fields = {"request_id": name, "status": error.status}
            log.info("request %s refused: %s: %s", name or "-", error.status, error, extra={"fields": fields})
            raise
        return Generation(admitted, shape, streams)

    async def _sequences(
        self, request: Any, context: Any, end: CallEnd
    ) -> tuple[list[Submission], ResponseShape]:
        model, limits = self.model, self.limits
        requests.check_counts(requests.counts(request), requests.most_elements(model, limits))
        pairs = context.invocation_metadata() or ()
        metadata, near = CallMetadata.of(pairs), self._entrance.near(pairs)
        timeout = requests.timeout_seconds(request, seconds_since_arrival(), context.time_remaining())
        # Before the prompt is encoded: under overload most calls end here.
        self.engine.check_room(requests.asked(request, metadata, timeout, limits))
        prompt_ids = await self._prompt_ids(request, limits)
        timeout = requests.timeout_seconds(request, seconds_since_arrival(), context.time_remaining())
        built = requests.build(request, metadata, prompt_ids, model, limits)
        if built.grammar is not None:
            built = replace(built, grammar=await self._grammars.check(built.grammar))
            timeout = requests.timeout_seconds(request, seconds_since_arrival(), context.time_remaining())
        built = await self.handoffs.apply(request, built)
        shape = requests.response_shape(request, model)
        sequences = [
            Submission(
                sequence,
                requests.output_text(sequence, shape, model),
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
        if request.WhichOneof("prompt") not in ("text", "chat"):
            ids: Sequence[int] = request.token_ids.ids
            return tuple(ids)
        if request.WhichOneof("prompt") == "chat":
            size, encode = request.chat.ByteSize(), partial(chat.encode, request.chat, self.model, limits)
        else:
            size, encode = len(request.text), partial(_encode, request.text, self.model, limits)
        if size > LONG_TEXT:
            async with self._long_texts:
                return await asyncio.to_thread(encode)
        return encode()


def _encode(text: str, model: ServedModel, limits: Limits) -> list[int]:
    if model.tokenizer is None:
        shown = text[: requests.SHOWN]
        raise InvalidArgument("text", shown, "absent: this model has no tokenizer; send token_ids")
    requests.check_text(text, limits)
    return model.tokenizer.encode(text)


def limits_of(engine: Engine) -> Limits:
    """Limits of a request, once the ranks are ready."""
    return Limits(max_context=engine.max_context, num_ranks=engine.num_ranks)


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Names fields in errors as a door's own protocol does. names: of GenerateRequest -> of the door."""
    try:
        yield
    except InvalidArgument as error:
        field, bracket, place = error.field.partition("[")
        # A second error would keep this one's frames.
        error.rename(names.get(field, field) + bracket + place)
        raise
    except ContextLengthExceeded as error:
        limit = requests.MAX_NEW_TOKENS
        error.args = (str(error).replace(limit, names.get(limit, limit)),)
        raise
