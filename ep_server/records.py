"""Frozen records that the ten steps of a request pass on. Data only; no imports from this package.

Units: tokens, blocks, seconds (monotonic clock of the process that wrote it) unless a name says otherwise.
A request has two names: `request_id` (the caller's string, in the server process only) and `number`
(a process-wide increasing integer that ranks use).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended normally. Errors and cancels are not finish reasons: they are statuses."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn. temperature 0 is greedy. top_k 0, top_p 1, min_p 0 mean "off".

    logit_bias: (token id, bias) pairs added to the logits before temperature.
    allowed_token_ids: distinct ids, the only ones that may be drawn; empty = all.
    logprobs: number of top alternatives to report per token; None reports nothing, 0 the chosen token only.
    seed: of this request's own generator; None only before admission: the server draws one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """The most likely token is taken; no generator is used."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a sequence ends. eos_token_ids is empty where the request said ignore_eos.

    stop_token_ids end with STOP_TOKEN, eos_token_ids with EOS; neither can be drawn before
    min_new_tokens. stop_strings are matched in the server process, over detokenized text.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One admitted request, validated: every id is in the vocabulary, prompt + max fits the context."""

    request_id: str
    number: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    priority: int = 0  # higher first
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    bypass_prefix_cache: bool = False
    dp_rank: int | None = None  # requested by the caller; None lets the scheduler choose


@dataclass(frozen=True, slots=True)
class SeqSlice:
    """The part of one sequence that one step runs.

    token_ids: the ids at positions start .. start + len(token_ids); PENDING_TOKEN alone where it is the
      token that the previous step draws, known only on the device so far.
    blocks: KV block ids covering positions 0 .. start + len(token_ids); a live read-only view.
    sample: logits of the last token are needed and a token is drawn.
    admission: how often its sequence was given blocks; until the next time they only become more.
    """

    number: int
    start: int
    token_ids: Sequence[int]
    blocks: Sequence[int]
    sample: bool
    admission: int = 0


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one rank runs in one step. Never leaves the rank. Empty slices = an idle rank that takes part."""

    slices: tuple[SeqSlice, ...]
    num_tokens: int


NO_TOKEN = -1  # the logits of a row held NaN or infinity
PENDING_TOKEN = -2  # drawn by a step that is still in flight


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One drawn token. logprob is natural log after penalties and bias, before temperature and filters.

    token_id: NO_TOKEN if none could be drawn; the request then fails.
    top: (token id, logprob), best first, as many as the request asked for.
    """

    number: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token for the stream of a request; `finish` is set on its last one.

    cached_tokens: prompt tokens taken from the prefix cache (meaningful on the first event).
    queued_ns: on the first event, from arrival at the rank to the plan of the first step that ran it; else 0.
    """

    number: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0
    queued_ns: int = 0


@dataclass(frozen=True, slots=True)
class RankReady:
    """What a rank reports once its weights are loaded and it is warm.

    attention: which kernels a GPU decodes with and why; "" on a CPU.
    """

    rank: int
    pid: int
    kv_blocks: int
    block_size: int
    weight_bytes: int
    kv_bytes: int
    exchange_bytes: int
    load_seconds: float
    attention: str = ""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Scheduler state of one rank after a step; gauges of /metrics and GetLoads come from it."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_blocks_cached: int = 0
    steps: int = 0
    prefix_queries: int = 0  # prompt tokens looked up, cumulative
    prefix_hits: int = 0  # prompt tokens found, cumulative
    preemptions: int = 0  # cumulative


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of a rank: what it ran, and how long its parts took, one after the other.

    step: counted from 0 since the rank was ready. start_ns: of the monotonic clock of the host.
    """

    step: int
    start_ns: int
    tokens: int
    sequences: int
    micro_batches: int
    plan_ns: int
    vote_ns: int
    run_ns: int
    publish_ns: int


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """Cumulative measurements of one rank since its start.

    histograms: name -> counts per log2 bucket; bucket b counts durations in [2^b, 2^(b+1)) ns.
      Names: "<op>/<part>" with op in dispatch, combine, vote and part in send, wait, expand, reduce, total;
      "step/<phase>" with phase in plan, vote, attention, router, dispatch, experts, combine, sample,
      publish, total.
    sums: name -> sum of the durations of the histogram of that name, ns.
    counters: name -> cumulative number (idle_steps, padded_tokens, bytes/<op>, tokens, ...).
      experts_active: local experts that received a row, added up over layers and steps.
    peer_wait_ns: (op, peer) -> ns this rank waited for that peer, cumulative.
    expert_tokens: tokens this rank's local experts received, cumulative, by global expert id.
    last_steps: the last steps, oldest first; a few.
    """

    rank: int
    load: RankLoad = field(default_factory=RankLoad)
    histograms: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    peer_wait_ns: dict[tuple[str, int], int] = field(default_factory=dict)
    expert_tokens: dict[int, int] = field(default_factory=dict)
    last_steps: tuple[StepTrace, ...] = ()
