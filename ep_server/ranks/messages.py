"""Converts records to and from the messages of rank.proto, for both ends of a channel.

The same messages travel in frames on a Unix socket or in a gRPC stream. Units: as in the records.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from itertools import islice

from ep_server import errors
from ep_server.errors import (
    ConfigError,
    EpServerError,
    GrammarUnfollowed,
    InternalError,
    PeerLost,
    PeerTimeout,
)
from ep_server.records import (
    FinishReason,
    Grammar,
    GrammarKind,
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheCleared,
    KvEvent,
    KvEventBatch,
    KvSnapshot,
    KvSource,
    PromptLogprobs,
    RankLoad,
    RankReady,
    RankStatistics,
    Request,
    Sampling,
    StepTrace,
    Stopping,
    TokenEvent,
)
from ep_server.scheduler.placement import Placement
from ep_server.v1 import rank_pb2 as pb

_FINISH_TO_WIRE = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}
_LOAD_FIELDS = tuple(RankLoad.__dataclass_fields__)
_READY_FIELDS = tuple(RankReady.__dataclass_fields__)
_STEP_FIELDS = tuple(StepTrace.__dataclass_fields__)


def add_message(request: Request, work_number: int) -> pb.ToRank:
    """A request for the rank that the message is sent to."""
    s, t, g = request.sampling, request.stopping, request.grammar
    return pb.ToRank(
        add=pb.Add(
            work_number=work_number,
            request=pb.Request(
                request_id=request.request_id,
                number=request.number,
                prompt_ids=request.prompt_ids,
                sampling=pb.Sampling(
                    temperature=s.temperature,
                    top_k=s.top_k,
                    top_p=s.top_p,
                    min_p=s.min_p,
                    seed=s.seed,
                    repetition_penalty=s.repetition_penalty,
                    presence_penalty=s.presence_penalty,
                    frequency_penalty=s.frequency_penalty,
                    bias_token_ids=[token_id for token_id, _ in s.logit_bias],
                    bias_values=[bias for _, bias in s.logit_bias],
                    logprobs=s.logprobs,
                    allowed_token_ids=s.allowed_token_ids,
                    prompt_logprobs=s.prompt_logprobs,
                ),
                stopping=pb.Stopping(
                    max_new_tokens=t.max_new_tokens,
                    min_new_tokens=t.min_new_tokens,
                    eos_token_ids=sorted(t.eos_token_ids),
                    stop_token_ids=sorted(t.stop_token_ids),
                    stop_strings=t.stop_strings,
                    include_stop=t.include_stop,
                ),
                priority=request.priority,
                cache_salt=request.cache_salt,
                bypass_prefix_cache=request.bypass_prefix_cache,
                dp_rank=request.dp_rank,
                group=request.group,
                grammar=None if g is None else pb.Grammar(kind=g.kind, source=g.source),
                output_ids=request.output_ids,
                hold=request.hold,
                source=None if request.source is None else pb.KvSource(**request.source._asdict()),
            ),
        )
    )


def request_of(wire: pb.Request) -> Request:
    """The record that add_message was given."""
    s, t = wire.sampling, wire.stopping
    return Request(
        request_id=wire.request_id,
        number=wire.number,
        prompt_ids=tuple(wire.prompt_ids),
        sampling=Sampling(
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            seed=s.seed if s.HasField("seed") else None,
            repetition_penalty=s.repetition_penalty,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            logit_bias=tuple(zip(s.bias_token_ids, s.bias_values, strict=True)),
            logprobs=s.logprobs if s.HasField("logprobs") else None,
            allowed_token_ids=tuple(s.allowed_token_ids),
            prompt_logprobs=s.prompt_logprobs if s.HasField("prompt_logprobs") else None,
        ),
        stopping=Stopping(
            max_new_tokens=t.max_new_tokens,
            min_new_tokens=t.min_new_tokens,
            eos_token_ids=frozenset(t.eos_token_ids),
            stop_token_ids=frozenset(t.stop_token_ids),
            stop_strings=tuple(t.stop_strings),
            include_stop=t.include_stop,
        ),
        priority=wire.priority,
        cache_salt=wire.cache_salt,
        bypass_prefix_cache=wire.bypass_prefix_cache,
        dp_rank=wire.dp_rank if wire.HasField("dp_rank") else None,
        group=wire.group,
        grammar=Grammar(GrammarKind(wire.grammar.kind), wire.grammar.source)
        if wire.HasField("grammar")
        else None,
        output_ids=tuple(wire.output_ids),
        hold=wire.hold,
        source=_source_of(wire.source) if wire.HasField("source") else None,
    )


def _source_of(wire: pb.KvSource) -> KvSource:
    return KvSource(wire.address, wire.local, wire.key, wire.tokens, wire.weights)


def failed_message(number: int, message: str, *, by_grammar: bool = False) -> pb.FromRank:
    """A request that its rank cannot run any further."""
    failed = pb.RequestFailed(number=number, message=message, by_grammar=by_grammar)
    return pb.FromRank(request_failed=failed)


def placement_message(placement: Placement) -> pb.Placement:
    """Where experts are."""
    layers = zip(placement.experts, placement.serves, strict=True)
    return pb.Placement(
        num_experts=placement.num_experts,
        slots_per_rank=placement.slots_per_rank,
        layers=[pb.LayerPlacement(experts=experts, serves=map(int, serves)) for experts, serves in layers],
    )


def placement_of(wire: pb.Placement) -> Placement:
    """The placement that placement_message was given."""
    return Placement(
        wire.num_experts,
        wire.slots_per_rank,
        tuple(tuple(layer.experts) for layer in wire.layers),
        tuple(tuple(layer.serves) for layer in wire.layers),
    )


def tokens_message(events: Sequence[TokenEvent], step: int, weights: int = 0) -> pb.FromRank:
    """The tokens of one step, with the version of weights that drew them.

    A column in which every entry has its default is left out.
    """
    numbers, token_ids = [e.number for e in events], [e.token_id for e in events]
    tokens = pb.StepTokens(numbers=numbers, token_ids=token_ids, step=step, weights=weights)
    if any(e.finish for e in events):
        tokens.finish.extend([_FINISH_TO_WIRE[e.finish] for e in events])
    if any(e.cached_tokens for e in events):
        tokens.cached_tokens.extend([e.cached_tokens for e in events])
    if any(e.queued_ns for e in events):
        tokens.queued_ns.extend([e.queued_ns for e in events])
    if any(e.logprob is not None for e in events):
        tokens.logprobs.extend([math.nan if e.logprob is None else e.logprob for e in events])
    if any(e.top for e in events):
        tokens.top_counts.extend([len(e.top) for e in events])
        tokens.top_token_ids.extend([token_id for e in events for token_id, _ in e.top])
        tokens.top_logprobs.extend([logprob for e in events for _, logprob in e.top])
    return pb.FromRank(tokens=tokens)


def events_of(wire: pb.StepTokens) -> list[TokenEvent]:
    """The events that tokens_message was given, with their step."""
    size, step, weights = len(wire.numbers), wire.step, wire.weights
    top = zip(wire.top_token_ids, wire.top_logprobs, strict=True)
    columns = zip(
        wire.numbers,
        wire.token_ids,
        wire.logprobs or (math.nan,) * size,
        wire.top_counts or (0,) * size,
        wire.finish or (pb.FINISH_REASON_UNSPECIFIED,) * size,
        wire.cached_tokens or (0,) * size,
        wire.queued_ns or (0,) * size,
        strict=True,
    )
    return [
        TokenEvent(
            number,
            token_id,
            None if math.isnan(logprob) else logprob,
            tuple(islice(top, count)) if count else (),
            _FINISH_FROM_WIRE[finish],
            cached,
            queued,
            step,
            weights,
        )
        for number, token_id, logprob, count, finish, cached, queued in columns
    ]


def prompt_logprobs_message(scored: PromptLogprobs) -> pb.FromRank:
    """A part that fits into a message."""
    return pb.FromRank(
        prompt_logprobs=pb.PromptLogprobs(
            number=scored.number,
            start=scored.start,
            logprobs=scored.logprobs,
            top_token_ids=scored.top_ids,
            top_logprobs=scored.top_logprobs,
        )
    )


def prompt_logprobs_of(wire: pb.PromptLogprobs) -> PromptLogprobs:
    """The part that prompt_logprobs_message was given."""
    ids, top = array("I", wire.top_token_ids), array("f", wire.top_logprobs)
    return PromptLogprobs(wire.number, wire.start, array("f", wire.logprobs), ids, top)


def ready_message(ready: RankReady) -> pb.FromRank:
    """Reports that the rank is warm."""
    return pb.FromRank(ready=pb.Ready(**{name: getattr(ready, name) for name in _READY_FIELDS}))


def ready_of(wire: pb.Ready) -> RankReady:
    """The record that ready_message was given."""
    return RankReady(**{name: getattr(wire, name) for name in _READY_FIELDS})


def statistics_message(statistics: RankStatistics) -> pb.FromRank:
    """Cumulative measurements of a rank."""
    return pb.FromRank(
        statistics=pb.Statistics(
            rank=statistics.rank,
            load=pb.Load(**{name: getattr(statistics.load, name) for name in _LOAD_FIELDS}),
            histograms={name: pb.Histogram(counts=c) for name, c in statistics.histograms.items()},
            sums=statistics.sums,
            counters=statistics.counters,
            peer_waits=[
                pb.PeerWait(op=op, peer=peer, wait_ns=wait)
                for (op, peer), wait in statistics.peer_wait_ns.items()
            ],
            expert_tokens=statistics.expert_tokens,
            last_steps=[
                pb.StepTrace(**{name: getattr(step, name) for name in _STEP_FIELDS})
                for step in statistics.last_steps
            ],
        )
    )


def statistics_of(wire: pb.Statistics) -> RankStatistics:
    """The record that statistics_message was given."""
    return RankStatistics(
        rank=wire.rank,
        load=RankLoad(**{name: getattr(wire.load, name) for name in _LOAD_FIELDS}),
        histograms={name: tuple(h.counts) for name, h in wire.histograms.items()},
        sums=dict(wire.sums),
        counters=dict(wire.counters),
        peer_wait_ns={(w.op, w.peer): w.wait_ns for w in wire.peer_waits},
        expert_tokens=dict(wire.expert_tokens),
        last_steps=tuple(
            StepTrace(**{name: getattr(step, name) for name in _STEP_FIELDS}) for step in wire.last_steps
        ),
    )


def request_error_of(rank: int, wire: pb.RequestFailed) -> EpServerError:
    """Why a rank gave up a request."""
    if wire.by_grammar:
        return GrammarUnfollowed(wire.message)
    return InternalError(f"rank {rank}: {wire.message}")


def kv_events_message(batch: KvEventBatch) -> pb.FromRank:
    """Changes of a rank's prefix cache; which rank, the channel says."""
    wire = pb.KvEventBatch(
        sequence_number=batch.sequence_number,
        timestamp=batch.timestamp,
        block_size=batch.block_size,
        events=[_kv_event_message(event) for event in batch.events],
    )
    if (part := batch.snapshot) is not None:
        wire.snapshot.CopyFrom(pb.KvSnapshot(index=part.index, count=part.count, blocks=part.blocks))
    return pb.FromRank(kv_events=wire)


def kv_events_of(rank: int, wire: pb.KvEventBatch) -> KvEventBatch:
    """The record that kv_events_message was given."""
    part = wire.snapshot
    return KvEventBatch(
        rank=rank,
        sequence_number=wire.sequence_number,
        timestamp=wire.timestamp,
        block_size=wire.block_size,
        events=tuple(_kv_event_of(event) for event in wire.events),
        snapshot=KvSnapshot(part.index, part.count, part.blocks) if wire.HasField("snapshot") else None,
    )


def _kv_event_message(event: KvEvent) -> pb.KvEvent:
    if isinstance(event, KvBlocksStored):
        stored = pb.KvBlocksStored(
            block_hashes=event.block_hashes,
            parent_hash=event.parent_hash,
            token_ids=event.token_ids,
            cache_salt=event.cache_salt,
        )
        return pb.KvEvent(stored=stored)
    if isinstance(event, KvBlocksRemoved):
        return pb.KvEvent(removed=pb.KvBlocksRemoved(block_hashes=event.block_hashes))
    return pb.KvEvent(cleared=pb.KvCacheCleared())


def _kv_event_of(wire: pb.KvEvent) -> KvEvent:
    kind = wire.WhichOneof("kind")
    if kind == "stored":
        stored = wire.stored
        return KvBlocksStored(
            tuple(stored.block_hashes),
            stored.parent_hash if stored.HasField("parent_hash") else None,
            tuple(stored.token_ids),
            stored.cache_salt,
        )
    return KvBlocksRemoved(tuple(wire.removed.block_hashes)) if kind == "removed" else KvCacheCleared()


def one_line(error: BaseException) -> str:
    """The error's message on one line; never empty."""
    return " ".join(str(error).split()) or type(error).__name__


def fatal_message(error: BaseException) -> pb.FromRank:
    """The error that ends a rank. A foreign error becomes an InternalError that names its class."""
    if isinstance(error, ConfigError):
        return pb.FromRank(
            fatal=pb.Fatal(
                error_class="ConfigError",
                message=one_line(error),
                field=error.field,
                value_json=json.dumps(error.value, default=str),
                allowed=error.allowed,
            )
        )
    if isinstance(error, EpServerError):
        fatal = pb.Fatal(error_class=type(error).__name__, message=one_line(error))
        if isinstance(error, PeerTimeout | PeerLost):
            fatal.peer = error.peer
        return pb.FromRank(fatal=fatal)
    message = f"{type(error).__name__}: {one_line(error)}"
    return pb.FromRank(fatal=pb.Fatal(error_class="InternalError", message=message))


def interrupted_message(error: BaseException) -> pb.FromRank:
    """The error of another rank that this one outlives."""
    return pb.FromRank(interrupted=fatal_message(error).fatal)


def error_of(wire: pb.Fatal) -> EpServerError:
    """The error in a Fatal: of its own class if that takes only a message, else an InternalError."""
    if wire.error_class == "ConfigError":
        return ConfigError(wire.field, json.loads(wire.value_json), wire.allowed)
    kind = getattr(errors, wire.error_class, InternalError)
    plain = isinstance(kind, type) and issubclass(kind, EpServerError) and kind.__init__ is Exception.__init__
    error: EpServerError = kind(wire.message) if plain else InternalError(wire.message)
    return error
