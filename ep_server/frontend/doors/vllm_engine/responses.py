"""[10] Turns what a request produces into messages of VllmEngine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ep_server.engine.stream import Chunk, Completion
from ep_server.frontend.doors.vllm_engine.protocol import pb
from ep_server.records import FinishReason, PromptLogprobs, TokenEvent

_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}


class Responses:
    """The messages of one request."""

    def __init__(
        self, prompt_ids: Sequence[int], *, streams: bool, logprobs: bool, kv_params: str = ""
    ) -> None:
        """streams: chunks as they come; otherwise one message per sequence, at its end.

        kv_params: for the server that continues the request; "" = none.
        """
        self._kv_params = kv_params
        self._prompt_ids = prompt_ids
        self._streams = streams
        self._wants_logprobs = logprobs
        self._begun: set[int] = set()  # sequences that have had a message
        self._held: dict[int, list[TokenEvent]] = {}  # by sequence, where nothing streams
        self._scores: list[PromptLogprobs] = []

    def of(self, index: int, chunk: Chunk) -> Iterator[Any]:
        """The messages for what sequence `index` produced."""
        self._scores += chunk.prompt
        if not self._streams:
            self._held.setdefault(index, []).extend(chunk.events)
        elif chunk.events:
            yield self._chunk(index, chunk.events)
        if chunk.completion is not None:
            yield self._complete(index, chunk.completion)

    def _chunk(self, index: int, events: list[TokenEvent]) -> Any:
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=[event.token_id for event in events],
                prompt_tokens=len(self._prompt_ids),
                completion_tokens=len(events),
                output_logprobs=self._logprobs(events),
                input_logprobs=self._prompt_logprobs(index),
                index=index,
            )
        )

    def _complete(self, index: int, completion: Completion) -> Any:
        events = self._held.pop(index, [])
        complete = pb.GenerateComplete(
            output_ids=[event.token_id for event in events],
            finish_reason=_REASONS[completion.reason],
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=completion.output_tokens,
            cached_tokens=completion.cached_tokens,
            output_logprobs=self._logprobs(events),
            input_logprobs=self._prompt_logprobs(index),
            index=index,
        )
        if self._kv_params and index == 0:
            complete.kv_transfer_params_json = self._kv_params
        if isinstance(completion.match, str):
            complete.matched_stop_str = completion.match
        elif completion.reason is FinishReason.STOP_TOKEN and completion.match is not None:
            complete.matched_token_id = completion.match
        return pb.GenerateResponse(complete=complete)

    def _prompt_logprobs(self, index: int) -> Any:
        """In the first message of each sequence. The first token has none."""
        if not self._scores or index in self._begun:
            return None
        self._begun.add(index)
        values = [logprob for part in self._scores for logprob in part.logprobs]
        return pb.InputLogProbs(
            token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=each) for each in values)],
            token_ids=self._prompt_ids,
            top_logprobs=[pb.TopLogProbs(), *(top for part in self._scores for top in _alternatives(part))],
        )

    def _logprobs(self, events: list[TokenEvent]) -> Any:
        if not self._wants_logprobs or not events:
            return None
        return pb.OutputLogProbs(
            token_logprobs=[event.logprob or 0.0 for event in events],
            token_ids=[event.token_id for event in events],
            top_logprobs=[
                pb.TopLogProbs(
                    token_ids=[token for token, _ in event.top],
                    values=[logprob for _, logprob in event.top],
                )
                for event in events
            ],
        )


def _alternatives(part: PromptLogprobs) -> Iterator[Any]:
    for at in range(len(part.logprobs)):
        own = slice(at * part.top, (at + 1) * part.top)
        yield pb.TopLogProbs(values=part.top_logprobs[own], token_ids=part.top_ids[own])
