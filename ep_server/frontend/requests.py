"""[2] Turns a GenerateRequest into a Request, or names the field that is wrong.

Every error names the field as the proto does, its value, and what is allowed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ep_server.config import Config
from ep_server.engine.admission import Asked
from ep_server.errors import ContextLengthExceeded, InvalidArgument, NotFound
from ep_server.frontend.call_metadata import PRIORITY_KEY, RANK_KEY, CallMetadata, agreed
from ep_server.frontend.served_model import SAMPLING_RANGES, ServedModel
from ep_server.records import Grammar, GrammarKind, Request, Sampling, Stopping
from ep_server.text.detokenizer import OutputText
from ep_server.text.tokenizer import Detokenizer

MAX_REQUEST_ID = 128
MAX_CACHE_SALT = 256
MAX_DEADLINE_MS = 86_400_000
MAX_STOP_TOKENS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_LOGIT_BIAS = 1024
MAX_SEQUENCES = 128
MAX_TOP_N = 20
MAX_PROMPT_LOGPROBS = 20
MAX_STREAM_INTERVAL = 1024
MAX_GRAMMAR_BYTES = 1 << 18
MAX_CHOICES = 10_000
MAX_CHAT_MESSAGES = 2048
TEXT_PER_TOKEN = 64  # bytes of a prompt for each token of the context: longer text is not encoded
ID_BYTES = 5  # of a token id in a message, at most
OTHER_BYTES = 1 << 16  # of a message: everything but the prompt, allowed_token_ids and the grammar
UNITS = {
    "logit_bias": "entries",
    "stop_strings": "strings",
    "choices": "texts",
    "messages": "messages",
}  # of repeated fields
MAX_NEW_TOKENS = "stopping.max_new_tokens"  # in errors
SHOWN = 80  # characters of a value that an error message repeats


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this server. max_context: of the model, or of a rank's KV cache if that is smaller."""

    max_context: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """Contents of a stream's events."""

    token_ids: bool
    text: bool
    logprobs: bool
    interval: int


def longest_message(max_context: int, vocab_size: int) -> int:
    """Upper bound in bytes of a GenerateRequest whose fields are all within their limits."""
    return TEXT_PER_TOKEN * max_context + ID_BYTES * vocab_size + MAX_GRAMMAR_BYTES + OTHER_BYTES


def with_message_limit(config: Config, max_context: int, vocab_size: int) -> Config:
    """The configuration with grpc.max_message_bytes resolved where it is 0."""
    if config.grpc.max_message_bytes:
        return config
    return replace(
        config, grpc=replace(config.grpc, max_message_bytes=longest_message(max_context, vocab_size))
    )


def counts(proto: Any) -> dict[str, int]:
    """Counts the elements of each repeated field, by dotted name."""
    sampling, stopping = proto.sampling, proto.stopping
    return {
        "token_ids.ids": len(proto.token_ids.ids),
        "sampling.logit_bias": len(sampling.logit_bias),
        "sampling.allowed_token_ids": len(sampling.allowed_token_ids),
        "stopping.stop_token_ids": len(stopping.stop_token_ids),
        "stopping.stop_strings": len(stopping.stop_strings),
        "grammar.choice.choices": len(proto.grammar.choice.choices),
        "chat.messages": len(proto.chat.messages),
    }


def most_elements(model: ServedModel, limits: Limits) -> dict[str, int]:
    """Most elements of each repeated field, by dotted name."""
    return {
        "token_ids.ids": limits.max_context,
        "sampling.logit_bias": MAX_LOGIT_BIAS,
        "sampling.allowed_token_ids": model.vocab_size,
        "stopping.stop_token_ids": MAX_STOP_TOKENS,
        "stopping.stop_strings": MAX_STOP_STRINGS,
        "grammar.choice.choices": MAX_CHOICES,
        "chat.messages": MAX_CHAT_MESSAGES,
    }


def check_counts(found: Mapping[str, int], most: Mapping[str, int]) -> None:
    """Checks the number of elements of a message before anything reads or copies them.

    found: as counts() gives it; absent = 0. Raises: InvalidArgument, ContextLengthExceeded.
    """
    for name, limit in most.items():
        count = found.get(name, 0)
        if name == "token_ids.ids" and count > limit:
            raise ContextLengthExceeded(f"prompt of {count} tokens: at most {limit}")
        unit = UNITS.get(name.rpartition(".")[2], "ids")
        _check(name, count <= limit, f"{count} {unit}", f"at most {limit} {unit}")


def longest_text(limits: Limits) -> int:
    """Bytes of a prompt's text, at most."""
    return TEXT_PER_TOKEN * limits.max_context


def check_text(text: str, limits: Limits) -> None:
    """Before a prompt is encoded. Raises: ContextLengthExceeded."""
    longest = longest_text(limits)
    size = len(text.encode())
    if size > longest:
        raise ContextLengthExceeded(f"text of {size} bytes: at most {longest}")


def request_id(proto: Any) -> str:
    """The caller's id, or a random one."""
    given: str = proto.request_id
    if not given:
        return secrets.token_hex(8)
    if len(given) > MAX_REQUEST_ID or not all("!" <= c <= "~" for c in given):
        allowed = f"1 to {MAX_REQUEST_ID} printable ASCII characters without spaces"
        raise InvalidArgument("request_id", given[:SHOWN], allowed)
    return given


def asked(proto: Any, metadata: CallMetadata, timeout: float | None, limits: Limits) -> Asked:
    """The part that admission needs, read before the rest. Raises: InvalidArgument."""
    stopping = proto.stopping
    rank = agreed(RANK_KEY, metadata.dp_rank, proto.dp_rank if proto.HasField("dp_rank") else None)
    return Asked(
        sequences=min(max(_given(proto.sampling, "num_sequences", 1), 1), MAX_SEQUENCES),
        priority=agreed(PRIORITY_KEY, metadata.priority, proto.priority or None) or 0,
        dp_rank=rank if rank is not None and rank < limits.num_ranks else None,
        max_new_tokens=stopping.max_new_tokens if stopping.HasField("max_new_tokens") else None,
        timeout=timeout,
    )


def build(
    proto: Any, metadata: CallMetadata, prompt_ids: Sequence[int], model: ServedModel, limits: Limits
) -> Request:
    """The validated request; the engine assigns its number. Call check_counts first.

    Raises: InvalidArgument, ContextLengthExceeded, NotFound.
    """
    if proto.model and proto.model != model.name:
        raise NotFound(f"model {proto.model[:SHOWN]!r} is not served here; this server serves {model.name!r}")
    _check_prompt(proto, prompt_ids, model)
    salt = proto.cache_salt
    _check("cache_salt", len(salt) <= MAX_CACHE_SALT, salt[:SHOWN], f"at most {MAX_CACHE_SALT} characters")
    given = proto.dp_rank if proto.HasField("dp_rank") else None
    dp_rank = agreed(RANK_KEY, metadata.dp_rank, given)
    name = RANK_KEY if given is None else "dp_rank"
    _check(name, dp_rank is None or dp_rank < limits.num_ranks, dp_rank, f"0 to {limits.num_ranks - 1}")
    sampling = _sampling(proto, model)
    stopping = _stopping(proto.stopping, len(prompt_ids), model, limits)
    _check_length(stopping, sampling, model)
    grammar = _grammar(proto, stopping, model)
    return Request(
        request_id=request_id(proto),
        number=0,
        prompt_ids=tuple(prompt_ids),
        sampling=sampling,
        stopping=stopping,
        priority=agreed(PRIORITY_KEY, metadata.priority, proto.priority or None) or 0,
        cache_salt=salt,
        bypass_prefix_cache=proto.bypass_prefix_cache,
        dp_rank=dp_rank,
        grammar=grammar,
    )


def sequences(proto: Any, request: Request) -> list[Request]:
    """One request per continuation asked for, each with its own seed; the first one scores the prompt.

    Raises: InvalidArgument.
    """
    count = _given(proto.sampling, "num_sequences", 1)
    _check("sampling.num_sequences", 1 <= count <= MAX_SEQUENCES, count, f"1 to {MAX_SEQUENCES}")
    first = request.sampling.seed or 0
    seeds = [(first + index) % 2**64 for index in range(1, count)]
    other = replace(request.sampling, prompt_logprobs=None)
    rest = replace(request, hold=b"", source=None)
    return [request, *(replace(rest, sampling=replace(other, seed=seed)) for seed in seeds)]


def response_shape(proto: Any, model: ServedModel) -> ResponseShape:
    """Shape of the events that the caller asks for. Raises: InvalidArgument."""
    options = proto.response
    text = _given(options, "output_text", model.tokenizer is not None)
    allowed = "false: this model has no tokenizer"
    _check("response.output_text", not text or model.tokenizer is not None, text, allowed)
    interval = _given(options, "stream_interval", 1)
    allowed = f"1 to {MAX_STREAM_INTERVAL}"
    _check("response.stream_interval", 1 <= interval <= MAX_STREAM_INTERVAL, interval, allowed)
    return ResponseShape(
        token_ids=_given(options, "output_token_ids", True),
        text=text,
        logprobs=options.output_logprobs,
        interval=interval,
    )


def output_text(request: Request, shape: ResponseShape, model: ServedModel) -> OutputText | None:
    """The request's detokeniser and stop strings; None where it needs neither."""
    stopping = request.stopping
    if model.tokenizer is None or not (shape.text or stopping.stop_strings):
        return None
    return OutputText(
        Detokenizer(model.tokenizer, request.prompt_ids),
        stopping.stop_strings,
        include_stop=stopping.include_stop,
        min_tokens=stopping.min_new_tokens,
    )


def timeout_seconds(proto: Any, waited: float, remaining: float | None) -> float | None:
    """Seconds left: the smaller of deadline_ms and the call's own deadline.

    waited: seconds since the call arrived. Raises: InvalidArgument.
    """
    if not proto.HasField("deadline_ms"):
        return remaining
    allowed = f"1 to {MAX_DEADLINE_MS}"
    _check("deadline_ms", 1 <= proto.deadline_ms <= MAX_DEADLINE_MS, proto.deadline_ms, allowed)
    asked = float(proto.deadline_ms) / 1000 - waited
    return asked if remaining is None else min(asked, remaining)


def _check_prompt(proto: Any, ids: Sequence[int], model: ServedModel) -> None:
    kind = proto.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("prompt", None, "text, token_ids or chat")
    name = "token_ids.ids" if kind == "token_ids" else str(kind)
    _check(name, bool(ids), [] if kind == "token_ids" else "", "at least one token")
    if max(ids) >= model.vocab_size:
        at = next(i for i, token in enumerate(ids) if token >= model.vocab_size)
        raise InvalidArgument(f"{name}[{at}]", ids[at], f"0 to {model.vocab_size - 1}")


def _sampling(proto: Any, model: ServedModel) -> Sampling:
    given, default = proto.sampling, model.defaults
    bias = tuple(sorted(given.logit_bias.items()))
    for token, value in bias:
        _check("sampling.logit_bias", token < model.vocab_size, token, f"ids 0 to {model.vocab_size - 1}")
        _check(f"sampling.logit_bias[{token}]", -100 <= value <= 100, value, "-100 to 100")
    ids = given.allowed_token_ids
    highest = max(ids, default=0)
    allowed = f"0 to {model.vocab_size - 1}"
    _check("sampling.allowed_token_ids", highest < model.vocab_size, highest, allowed)
    top_n, wanted = proto.response.top_n, proto.response.output_logprobs
    _check("response.top_n", top_n <= MAX_TOP_N, top_n, f"0 to {MAX_TOP_N}")
    _check("response.top_n", wanted or top_n == 0, top_n, "0 unless output_logprobs is set")
    scored = _given(proto.response, "prompt_logprobs", None)
    most = MAX_PROMPT_LOGPROBS
    _check("response.prompt_logprobs", scored is None or scored <= most, scored, f"0 to {most}")
    top_k = _given(given, "top_k", default.top_k)
    return Sampling(
        temperature=_number(given, default, "temperature"),
        top_k=0 if top_k >= model.vocab_size else top_k,
        top_p=_number(given, default, "top_p"),
        min_p=_number(given, default, "min_p"),
        seed=given.seed if given.HasField("seed") else secrets.randbits(63),
        repetition_penalty=_number(given, default, "repetition_penalty"),
        presence_penalty=_number(given, default, "presence_penalty"),
        frequency_penalty=_number(given, default, "frequency_penalty"),
        logit_bias=bias,
        logprobs=top_n if wanted else None,
        allowed_token_ids=tuple(sorted(set(ids))),
        prompt_logprobs=scored,
    )


def _stopping(given: Any, prompt: int, model: ServedModel, limits: Limits) -> Stopping:
    left = limits.max_context - prompt
    maximum = _given(given, "max_new_tokens", max(left, 1))
    _check("stopping.max_new_tokens", maximum >= 1, maximum, "at least 1")
    if maximum > left:
        raise ContextLengthExceeded(
            f"prompt of {prompt} tokens + {MAX_NEW_TOKENS} = {maximum}: "
            f"must be at most {limits.max_context} together"
        )
    minimum = given.min_new_tokens
    _check("stopping.min_new_tokens", minimum <= maximum, minimum, f"0 to max_new_tokens = {maximum}")
    tokens = list(given.stop_token_ids)
    for token in tokens:
        _check("stopping.stop_token_ids", token < model.vocab_size, token, f"0 to {model.vocab_size - 1}")
    strings = tuple(given.stop_strings)
    for text in strings:
        ok = 1 <= len(text) <= MAX_STOP_LENGTH
        _check("stopping.stop_strings", ok, text[:SHOWN], f"1 to {MAX_STOP_LENGTH} characters")
    if strings and model.tokenizer is None:
        raise InvalidArgument("stopping.stop_strings", list(strings), "absent: this model has no tokenizer")
    eos = frozenset() if given.ignore_eos else model.eos_token_ids
    return Stopping(
        max_new_tokens=maximum,
        min_new_tokens=minimum,
        eos_token_ids=eos,
        stop_token_ids=frozenset(tokens),
        stop_strings=strings,
        include_stop=given.include_stop,
    )


def _check_length(stopping: Stopping, sampling: Sampling, model: ServedModel) -> None:
    """Checks that some token may be drawn before min_new_tokens."""
    drawable = sampling.allowed_token_ids or range(model.vocab_size)
    ends = stopping.eos_token_ids | stopping.stop_token_ids
    ok = stopping.min_new_tokens == 0 or any(token not in ends for token in drawable)
    allowed = "0 where every token that may be drawn ends the output"
    _check("stopping.min_new_tokens", ok, stopping.min_new_tokens, allowed)


def _grammar(proto: Any, stopping: Stopping, model: ServedModel) -> Grammar | None:
    """The grammar of a request, not compiled yet; None without one."""
    if not proto.HasField("grammar"):
        return None
    given, kind = proto.grammar, proto.grammar.WhichOneof("source")
    if kind is None:
        raise InvalidArgument("grammar", None, " or ".join(sorted(set(GrammarKind) - {GrammarKind.PROGRAM})))
    source = ""
    if kind == "choice":
        choices = list(given.choice.choices)
        ok, allowed = bool(choices) and all(choices), "at least one text, none of them empty"
        _check("grammar.choice.choices", ok, choices[:2], allowed)
        source = json.dumps(choices)
    elif kind == "json_object":
        _check("grammar.json_object", given.json_object, False, "true")
    else:
        source = getattr(given, kind)
        _check(f"grammar.{kind}", bool(source), source, "not empty")
    size, allowed = len(source.encode()), f"at most {MAX_GRAMMAR_BYTES} bytes"
    _check(f"grammar.{kind}", size <= MAX_GRAMMAR_BYTES, f"{size} bytes", allowed)
    allowed = "absent: this model has no tokenizer"
    _check(f"grammar.{kind}", model.tokenizer is not None, source[:SHOWN], allowed)
    ends = bool(stopping.eos_token_ids)
    _check("stopping.ignore_eos", ends or not model.eos_token_ids, True, "false with a grammar")
    allowed = "absent: this model has no token that ends a sequence"
    _check(f"grammar.{kind}", ends, source[:SHOWN], allowed)
    return Grammar(GrammarKind(kind), source)


def _number(given: Any, default: Sampling, name: str) -> float:
    """Checks that a number of Sampling is within its range."""
    value = float(_given(given, name, getattr(default, name)))
    _check(f"sampling.{name}", SAMPLING_RANGES[name].holds(value), value, str(SAMPLING_RANGES[name]))
    return value


def _given(message: Any, name: str, default: Any) -> Any:
    return getattr(message, name) if message.HasField(name) else default


def _check(name: str, ok: bool, value: Any, allowed: str) -> None:
    if not ok:
        raise InvalidArgument(name, value, allowed)
