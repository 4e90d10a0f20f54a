"""What a call returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ep_server.records import FinishReason
from ep_server.v1 import decode_pb2

_REASONS = {decode_pb2.FinishReason.Value(f"FINISH_REASON_{each.name}"): each for each in FinishReason}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log of a token's probability. top: (token id, log probability), most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def of(wire: Any) -> TokenLogprob:
        """From a TokenLogprob of decode.proto."""
        return TokenLogprob(wire.logprob, tuple((each.token_id, each.logprob) for each in wire.top))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens drawn since the last event of the same sequence.

    text: final; may lag behind token_ids. index: the sequence. For the last token: rank that drew it, step
    of that rank, weights_version of its weights.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob]
    index: int
    step: int
    weights_version: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """The request was admitted. rank: that runs it at first. seed: of sequence 0, given or random."""

    request_id: str
    model: str
    prompt_tokens: int
    rank: int
    seed: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one sequence. cached_tokens: of the prompt, found in the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations that the server measured, in seconds."""

    first_token_seconds: float
    total_seconds: float
    max_token_gap_seconds: float
    queued_seconds: float
    prefill_seconds: float

    def tokens_per_second(self, usage: Usage) -> float:
        """After the first token; 0 for a single one."""
        seconds = self.total_seconds - self.first_token_seconds
        return (usage.output_tokens - 1) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sequence. stop_match: the token id or stop string that ended it."""

    reason: FinishReason
    stop_match: int | str | None
    usage: Usage
    timings: Timings


@dataclass(slots=True)
class Output:
    """All events of one stream so far, put together. `finished` is set once the output is complete.

    others: sequences 1 and up of a request with num_sequences; the rest is sequence 0.
    prompt_logprobs: of every prompt token except the first. kv_handle: of a request with hold_kv.
    """

    info: PromptInfo | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    kv_handle: decode_pb2.KvHandle | None = None
    finished: Finished | None = None
    others: list[Output] = field(default_factory=list)

    @property
    def sequences(self) -> list[Output]:
        """This one and the others."""
        return [self, *self.others]

    def add(self, event: Any) -> Tokens | None:
        """Adds one GenerateResponse. Returns: its tokens, if it has any."""
        kind = event.WhichOneof("event")
        if kind == "tokens":
            tokens = _tokens(event.tokens)
            output = self._of(tokens.index)
            output.token_ids += tokens.token_ids
            output.text += tokens.text
            output.logprobs += tokens.logprobs
            return tokens
        if kind == "prompt_info":
            self.info = _flat(PromptInfo, event.prompt_info)
        elif kind == "kv_handle":
            self.kv_handle = event.kv_handle
        elif kind == "prompt_logprobs":
            self.prompt_logprobs += [TokenLogprob.of(each) for each in event.prompt_logprobs.logprobs]
        elif kind == "finished":
            self._of(event.finished.index).finished = _finished(event.finished)
        return None

    def _of(self, index: int) -> Output:
        while len(self.others) < index:
            self.others.append(Output(self.info))
        return self.others[index - 1] if index else self


def _tokens(wire: Any) -> Tokens:
    logprobs = [TokenLogprob.of(each) for each in wire.logprobs]
    last = wire.step, wire.weights_version, wire.rank
    return Tokens(list(wire.token_ids), wire.text, logprobs, wire.index, *last)


def _finished(wire: Any) -> Finished:
    match = wire.WhichOneof("stop_match")
    return Finished(
        _REASONS[wire.reason],
        getattr(wire, match) if match else None,
        _flat(Usage, wire.usage),
        _flat(Timings, wire.timings),
    )


def _flat(kind: Any, wire: Any) -> Any:
    """A dataclass whose fields are those of a message."""
    return kind(**{name: getattr(wire, name) for name in kind.__dataclass_fields__})
