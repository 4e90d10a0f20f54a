"""Turns what the sequences of a request produce into ModelInferResponse messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tritonclient.grpc import service_pb2

from ep_server.engine.stream import Chunk
from ep_server.frontend.doors.oip.inference import VERSION, ResponseForm
from ep_server.frontend.doors.oip.tensors import OUTPUTS, encode
from ep_server.records import FinishReason, TokenEvent
from ep_server.text.tokenizer import Tokenizer

FINAL = "triton_final_response"


@dataclass(slots=True)
class _Sequence:
    """What a sequence produced since the last response. reason: "" before its end. total: of all logprobs."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    scores: list[dict[int, Any]] = field(default_factory=list)
    reason: str = ""
    total: float = 0.0


class Responses:
    """Builds the responses of one request."""

    def __init__(
        self, form: ResponseForm, tokenizer: Tokenizer | None, num_sequences: int, prompt_tokens: int
    ) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._sequences = [_Sequence() for _ in range(num_sequences)]

    @property
    def complete(self) -> bool:
        """All sequences have ended."""
        return all(sequence.reason for sequence in self._sequences)

    def add(self, index: int, chunk: Chunk) -> None:
        """Takes in what sequence `index` produced."""
        sequence = self._sequences[index]
        sequence.text += chunk.text
        sequence.ids.extend(event.token_id for event in chunk.events)
        sequence.total += sum(event.logprob or 0.0 for event in chunk.events)
        if "logprobs" in self._form.outputs:
            sequence.scores.extend(self._score(event) for event in chunk.events)
        if chunk.completion is not None:
            ended = chunk.completion.reason is FinishReason.LENGTH
            sequence.reason = "length" if ended else "stop"

    def take(self) -> Any:
        """A response with everything since the last one."""
        response = new_response(self._form)
        for name in self._form.outputs:
            spec, values = OUTPUTS[name], _VALUES[name](self)
            response.outputs.add(name=name, datatype=spec.datatypes[0], shape=[len(values)])
            response.raw_output_contents.append(encode(spec, values))
        for sequence in self._sequences:
            sequence.text, sequence.ids, sequence.scores = "", [], []
        return response

    def _score(self, event: TokenEvent) -> dict[int, Any]:
        ranks = {token: rank for rank, (token, _) in enumerate(event.top, start=1)}
        found = {event.token_id: event.logprob or 0.0} | dict(event.top)
        return {
            token: {
                "logprob": logprob,
                "rank": ranks.get(token),
                "decoded_token": None if self._tokenizer is None else self._tokenizer.decode([token]),
            }
            for token, logprob in found.items()
        }

    def _each(self, value: Callable[[_Sequence], Any]) -> list[Any]:
        return [value(sequence) for sequence in self._sequences]


_VALUES: Final[Mapping[str, Callable[[Responses], Sequence[Any]]]] = {
    "text_output": lambda of: of._each(lambda each: (of._form.prompt + each.text).encode()),
    "output_ids": lambda of: of._sequences[0].ids,
    "finish_reason": lambda of: of._each(lambda each: (each.reason or "None").encode()),
    "cumulative_logprob": lambda of: of._each(lambda each: each.total),
    "logprobs": lambda of: of._each(lambda each: json.dumps(each.scores).encode()),
    "num_input_tokens": lambda of: [of._prompt_tokens],
    "num_output_tokens": lambda of: of._each(lambda each: len(each.ids)),
}


def new_response(form: ResponseForm) -> Any:
    """Without outputs yet."""
    return service_pb2.ModelInferResponse(model_name=form.model_name, model_version=VERSION, id=form.id)


def in_stream(response: Any, *, final: bool) -> Any:
    """As a message of ModelStreamInfer. final: the last one of its request."""
    response.parameters[FINAL].bool_param = final
    return service_pb2.ModelStreamInferResponse(infer_response=response)


def failed(form: ResponseForm, message: str) -> Any:
    """The last message of a request that failed, in a stream that goes on."""
    last = in_stream(new_response(form), final=True)
    last.error_message = message
    return last
