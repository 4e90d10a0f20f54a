"""Frozen records that the ten steps of a request pass on. Data only; no imports from this package.

Units: tokens, blocks, seconds (monotonic clock of the process that wrote it) unless a name says otherwise.
A request has two names: `request_id`, the caller's, in the server process only, and `number`, for ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


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
    prompt_logprobs: the same for the tokens of the prompt.
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
    prompt_logprobs: int | None = None

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


class LossCause(StrEnum):
    """Why a rank is lost."""

    SIGNAL = "signal"  # its process was killed
    EXIT = "exit"  # its process ended with an exit code, without a message
    EXCEPTION = "exception"  # a Python or native error, or a message that is none
    CUDA = "cuda"  # an error of its GPU
    HANG = "hang"  # it runs and does not answer
    NODE = "node"  # its node is lost


class GrammarKind(StrEnum):
    """What the source of a grammar is; names as in decode.proto, except the last."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # the source is empty
    REGEX = "regex"
    CHOICE = "choice"  # the source is a JSON list of texts
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"
    PROGRAM = "program"  # in the notation of the grammar library, checked: what ranks get


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an output must match."""

    kind: GrammarKind
    source: str


class KvSource(NamedTuple):
    """Another server keeps the KV of a prompt's first `tokens` tokens under `key`.

    address: host:port of its rank. local: the rank's socket for processes of its host; "" = none.
    weights: version of this server's weights, which equal those that computed it.
    """

    address: str
    local: str
    key: bytes
    tokens: int
    weights: int = 0


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
    group: int = 0  # number of the first of several sequences that share their prompt's blocks; 0 = alone
    grammar: Grammar | None = None
    output_ids: tuple[int, ...] = ()  # drawn by a group of ranks that was lost; the next token follows them
    hold: bytes = b""  # key under which another server fetches the prompt's KV blocks; empty: none may
    source: KvSource | None = None  # of the prompt's KV blocks


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of a slice whose logits give the log probability of the prompt token after each.

    start: position of the first row. targets: the tokens from start + 1 on. top: alternatives of each.
    """

    start: int
    targets: Sequence[int]
    top: int


@dataclass(frozen=True, slots=True)
class SeqSlice:
    """The part of one sequence that one step runs.

    token_ids: the ids at positions start .. start + len(token_ids); PENDING_TOKEN alone where it is the
      token that the previous step draws, known only on the device so far.
    blocks: KV block ids covering positions 0 .. start + len(token_ids); a live read-only view.
    sample: logits of the last token are needed and a token is drawn.
    admission: how often its sequence was given blocks; until the next time they only become more.
    scored: rows that score prompt tokens; never of a slice that decodes.
    """

    number: int
    start: int
    token_ids: Sequence[int]
    blocks: Sequence[int]
    sample: bool
    admission: int = 0
    scored: ScoredRows | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one rank runs in one step. Never leaves the rank. Empty slices = an idle rank that takes part."""

    slices: tuple[SeqSlice, ...]
    num_tokens: int


class KvLoad(NamedTuple):
    """(block, slot) pairs to copy from host memory for one sequence, which then runs. ticket: from 1."""

    ticket: int
    copies: tuple[tuple[int, int], ...]


class KvMoves(NamedTuple):
    """Copies between KV blocks and slots in host memory; they precede the step that was planned with them."""

    saves: tuple[tuple[int, int], ...] = ()  # (block, slot), before any load
    loads: tuple[KvLoad, ...] = ()
    fresh: tuple[int, ...] = ()  # the step or a load may write these: earlier copies that use one end first


EMPTY, WAYS = -1, 24  # a slot without an expert; parts of an expert's tokens, which 2, 3, 4 ... slots share
NO_TOKEN = -1  # the logits of a row held NaN or infinity
LATE_TOKEN = -3  # the mask of its grammar was not ready: nothing was drawn, and its slice runs again
PENDING_TOKEN = -2  # drawn by a step that is still in flight
SCORES_PER_MESSAGE = 256  # prompt tokens; with 20 alternatives each, a message to the caller has about 60 KB


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One drawn token. logprob is natural log after penalties and bias, before temperature and filters.

    token_id: NO_TOKEN if none could be drawn; the request then fails. LATE_TOKEN: see there.
    top: (token id, logprob), best first, as many as the request asked for.
    """

    number: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of consecutive prompt tokens of a request: of the model, without any edit of logits.

    start: position of the first of these tokens. logprobs: of the prompt's own tokens.
    top_ids, top_logprobs: alternatives, best first, as many for each token; those of all tokens end to end.
    """

    number: int
    start: int
    logprobs: Sequence[float]
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()

    @property
    def top(self) -> int:
        """Alternatives of each token."""
        return len(self.top_ids) // len(self.logprobs)

    def parts(self) -> Iterator[PromptLogprobs]:
        """The same in order, each part small enough for one message."""
        top = self.top
        for first in range(0, len(self.logprobs), SCORES_PER_MESSAGE):
            end = first + SCORES_PER_MESSAGE
            own, others = slice(first, end), slice(first * top, end * top)
            ids, logprobs = self.top_ids[others], self.top_logprobs[others]
            yield PromptLogprobs(self.number, self.start + first, self.logprobs[own], ids, logprobs)


class TokenEvent(NamedTuple):
    """A token for the stream of a request; `finish` is set on its last one. A tuple: many are made in a step.

    cached_tokens: prompt tokens taken from the prefix cache (meaningful on the first event).
    queued_ns: on the first event, from arrival at the rank to the plan of the first step that ran it; else 0.
    step: of the rank, that drew it; counted as in StepTrace. weights: version of the weights it ran with.
    """

    number: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0
    queued_ns: int = 0
    step: int = 0
    weights: int = 0


@dataclass(frozen=True, slots=True)
class KvBlocksStored:
    """Blocks that later requests may share, each the child of the one before it.

    block_hashes: one per block. parent_hash: of the block before the first; None: it begins a sequence.
    token_ids: of all blocks, one after the other. cache_salt: only requests with it share them.
    """

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    token_ids: tuple[int, ...]
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class KvBlocksRemoved:
    """Blocks that were evicted."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvCacheCleared:
    """No block stored before can be shared any more."""


KvEvent = KvBlocksStored | KvBlocksRemoved | KvCacheCleared


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """Part `index` of `count` that together list all blocks of a rank, `blocks` in number.

    The first part begins with KvCacheCleared.
    """

    index: int
    count: int
    blocks: int


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Changes of one rank's prefix cache, in order.

    sequence_number: of this rank alone, from 1 without gaps. timestamp: Unix time, seconds.
    block_size: tokens of every block. snapshot: this batch repeats what the rank already holds.
    """

    rank: int
    sequence_number: int
    timestamp: float
    block_size: int
    events: tuple[KvEvent, ...]
    snapshot: KvSnapshot | None = None


@dataclass(frozen=True, slots=True)
class RankReady:
    """What a rank reports once its weights are loaded and it is warm.

    attention: which kernels a GPU decodes with and why; "" on a CPU. kv_host_bytes: of the host tier.
    kv_address, kv_local: where other servers fetch KV blocks, as in KvSource; "" if they cannot."""

    rank: int
    pid: int
    kv_blocks: int
    block_size: int
    weight_bytes: int
    kv_bytes: int
    exchange_bytes: int
    load_seconds: float
    attention: str = ""
    kv_host_bytes: int = 0
    kv_address: str = ""
    kv_local: str = ""
    gpus: int = 0  # that ranks of its host can use
    pid_space: str = ""  # see ranks.protocol


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
    prefix_host_hits: int = 0  # those of prefix_hits that were in host memory only
    host_blocks_total: int = 0  # slots for KV blocks in host memory
    host_blocks_used: int = 0
    kv_blocks_held: int = 0  # those of kv_blocks_used that only other servers need


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
      Names: "<op>/<part>" with op in dispatch, combine, vote, normal_dispatch, normal_combine and part in
      send, wait, expand, reduce, total; "step/<phase>" with phase in plan, vote, attention, router,
      dispatch, experts, combine, sample, publish, total.
    sums: name -> sum of the durations of the histogram of that name, ns.
    counters: name -> cumulative number (idle_steps, bytes/<op>, ...). experts_active: local experts that
      received a row, over layers and steps. network_bytes|retries/<peer>/<domain>: to other hosts.
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
