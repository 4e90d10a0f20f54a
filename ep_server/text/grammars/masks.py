"""The masks of a rank's requests: which tokens their grammars allow next. Computed in threads of its own.

A mask depends on the tokens of the output alone. accept() starts it as soon as a token is known, and it is
computed while the next step runs. The library bounds the work of one mask; beyond that the request fails. One
thread calls the methods. Two threads work without the GIL: one compiles, one computes masks.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import llguidance
import numpy as np
import tokenizers

from ep_server.records import Request
from ep_server.text.grammars.vocabulary import library_tokenizer, special_tokens

# Per mask about 14 ms of work on regular expressions and 2.5 ms of parsing; 30 MB of automata per grammar.
LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=200_000, step_max_items=50_000, max_lexer_states=30_000, verbose_errors=False
)
COMPILED = 64  # grammars that a rank keeps
SHOWN = 300  # characters of the library's message
SECONDS = 30.0  # until a mask must be there; the library's bounds end it long before

Matcher = llguidance.LLMatcher


@dataclass(slots=True, eq=False)
class _Follower:
    """A request and its mask: [W] int32, bit t % 32 of word t / 32 allows token t.

    allowed, early: what else the request allows, in general and before min_new_tokens; None = everything.
    ends: its special stop tokens, which may come where the end of the sequence may; None without any.
    matcher: of the tokens told so far, `length` of them; None until compiled. untold: the tokens after them.
    since: when the mask became out of date; None while it is up to date. error: why the request cannot go on.
    """

    program: str
    mask: np.ndarray
    min_new_tokens: int
    allowed: np.ndarray | None
    early: np.ndarray | None
    ends: np.ndarray | None
    since: float | None
    untold: list[int] = field(default_factory=list)
    length: int = 0
    matcher: Matcher | None = None
    error: str = ""
    removed: bool = False


class GrammarMasks:
    """See above. Made in a second if there are 150,000 tokens.

    Args:
        tokenizer: of the model; without one no request may have a grammar.
        vocab: tokens of a mask. eos: that end a sequence. threads: that compute the masks of one step.
        clock: monotonic seconds.
    Raises: CheckpointError for a tokenizer whose tokens have no bytes of their own.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer | None,
        vocab: int,
        eos: Iterable[int],
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.words = -(-vocab // 32)
        self._vocab, self._threads, self._clock = vocab, threads, clock
        eos = frozenset(eos)
        self._library: llguidance.LLTokenizer | None = None
        self._special = frozenset[int]()
        if tokenizer is not None and eos:
            self._library = library_tokenizer(tokenizer, vocab, eos)
            self._special = frozenset(special_tokens(tokenizer, vocab).values())
        self._end_bits = self._bits(eos)
        self._followers: dict[int, _Follower] = {}
        self._changed = threading.Condition()
        self._jobs: list[_Follower] = []  # guarded by _changed, as what threads share of a follower
        self._at_work = False
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()  # of the thread that compiles
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")  # threads start with their first job
        self._worker = ThreadPoolExecutor(1, "grammar-masks")
        self._executor: llguidance.LLExecutor | None = None  # of the thread that computes masks
        self._rows = np.zeros((0, self.words), dtype=np.int32)  # likewise

    def __len__(self) -> int:
        return len(self._followers)

    def __contains__(self, number: int) -> bool:
        return number in self._followers

    def __repr__(self) -> str:
        return f"GrammarMasks(requests={len(self._followers)}, compiled={len(self._compiled)})"

    def add(self, request: Request, output: Sequence[int] = ()) -> None:
        """Follows a request if it has a grammar. output: tokens it drew before."""
        if request.grammar is None:
            return
        assert self._library is not None  # the frontend has checked it
        ids, stopping = request.sampling.allowed_token_ids, request.stopping
        allowed = self._bits(ids) if ids else None
        early = allowed
        if stopping.min_new_tokens:
            early = ~self._bits(stopping.eos_token_ids | stopping.stop_token_ids)
            early = early if allowed is None else early & allowed
        ends = stopping.stop_token_ids & self._special
        follower = self._followers[request.number] = _Follower(
            request.grammar.source,
            np.zeros(self.words, dtype=np.int32),
            stopping.min_new_tokens,
            allowed,
            early,
            self._bits(ends) if ends else None,
            self._clock(),
            list(output),
        )
        self._compiler.submit(self._compile, follower)

    def accept(self, tokens: Mapping[int, int]) -> None:
        """Takes what requests drew, by number, and starts to compute their next masks."""
        now = self._clock()
        with self._changed:
            for number, token in tokens.items():
                follower = self._followers.get(number)
                if follower is not None and not follower.error:
                    follower.untold.append(token)
                    follower.since = now
                    if follower.matcher is not None:
                        self._enqueue(follower)

    def remove(self, number: int) -> None:
        """Forgets a request; unknown numbers are ignored."""
        follower = self._followers.pop(number, None)
        if follower is not None:
            follower.removed = True

    def ready(self, number: int) -> bool:
        """Whether the next token of a request may be drawn. Also one that has failed, or has no grammar."""
        follower = self._followers.get(number)
        return follower is None or follower.since is None or bool(follower.error)

    def wait(self, numbers: Collection[int], seconds: float) -> None:
        """Waits until all of them are ready(), at most so long."""
        if not all(self.ready(number) for number in numbers):
            with self._changed:
                self._changed.wait_for(lambda: all(self.ready(number) for number in numbers), seconds)

    def mask(self, number: int) -> np.ndarray | None:
        """[W] int32 of a request that is ready(), until its next accept(). None = everything: it failed."""
        follower = self._followers.get(number)
        return None if follower is None or follower.error else follower.mask

    def failures(self) -> dict[int, str]:
        """Why requests cannot go on, by number; until remove()."""
        overdue = self._clock() - SECONDS
        for follower in self._followers.values():
            if follower.since is not None and follower.since < overdue and not follower.error:
                follower.error = f"its mask was not there after {SECONDS:g} s"
        return {number: follower.error for number, follower in self._followers.items() if follower.error}

    def close(self) -> None:
        """Ends the threads, which finish what they began."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _bits(self, ids: Iterable[int]) -> np.ndarray:
        flags = np.zeros(self.words * 32, dtype=np.uint8)
        flags[list(ids)] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)

    def _compile(self, follower: _Follower) -> None:
        """In the thread that compiles."""
        if follower.removed:
            return
        matcher, error = None, ""
        try:
            matcher = self._matcher(follower.program)
            error = one_line(matcher.get_error()) if matcher.is_error() else ""
        except BaseException as failed:  # a panic of the library is no Exception; it is this request's alone
            error = one_line(str(failed))
        with self._changed:
            follower.matcher, follower.error = matcher, error
            if error:
                self._changed.notify_all()
            else:
                self._enqueue(follower)

    def _matcher(self, program: str) -> Matcher:
        """A new matcher at the beginning of an output; equal programs are compiled once."""
        compiled = self._compiled.pop(program, None)
        if compiled is None:
            assert self._library is not None
            compiled = Matcher(self._library, program, log_level=0, limits=LIMITS)
        self._compiled[program] = compiled
        if len(self._compiled) > COMPILED:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def _enqueue(self, follower: _Follower) -> None:
        """With the lock held."""
        if follower not in self._jobs:
            self._jobs.append(follower)
        if not self._at_work:
            self._at_work = True
            self._worker.submit(self._work)

    def _work(self) -> None:
        """In the thread that computes masks: until there is nothing to do."""
        while True:
            with self._changed:
                batch = [follower for follower in self._jobs if not follower.removed]
                self._jobs.clear()
                if not batch:
                    self._at_work = False
                    return
                tokens = [follower.untold for follower in batch]
                for follower in batch:
                    follower.untold = []
            errors = self._advance(batch, tokens)
            with self._changed:
                for follower, error in zip(batch, errors, strict=True):
                    follower.error = error
                    if not follower.untold:
                        follower.since = None
                self._changed.notify_all()

    def _advance(self, batch: Sequence[_Follower], tokens: Sequence[Sequence[int]]) -> list[str]:
        """Tells matchers their tokens and computes the masks. Returns: why a request cannot go on, or ""."""
        matchers = [follower.matcher for follower in batch if follower.matcher is not None]  # all
        try:
            for matcher, new in zip(matchers, tokens, strict=True):
                if new:
                    matcher.consume_tokens(list(new))
            self._compute(matchers)
        except BaseException as failed:  # a panic of the library; which matcher is broken is unknown
            return [one_line(str(failed))] * len(batch)
        for follower, new in zip(batch, tokens, strict=True):
            follower.length += len(new)
        errors = [one_line(m.get_error()) if m.is_error() else "" for m in matchers]
        rows = zip(batch, errors, self._rows, strict=False)
        return [error or self._finish(follower, row) for follower, error, row in rows]

    def _compute(self, matchers: Sequence[Matcher]) -> None:
        """Masks into the first rows of _rows."""
        if len(self._rows) < len(matchers):
            self._rows = np.zeros((len(matchers), self.words), dtype=np.int32)
        size, start = self.words * 4, self._rows.ctypes.data
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(start, size)
            return
        if self._executor is None:
            self._executor = llguidance.LLExecutor(num_threads=self._threads)
        pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, start, size, len(self._rows))

    def _finish(self, follower: _Follower, row: np.ndarray) -> str:
        """The mask of a request from that of its grammar. Returns: an error if nothing is left."""
        if follower.ends is not None and (row & self._end_bits).any():
            row |= follower.ends
        limit = follower.early if follower.length < follower.min_new_tokens else follower.allowed
        if limit is None:
            follower.mask[:] = row
        else:
            np.bitwise_and(row, limit, out=follower.mask)
        if follower.mask.any():
            return ""
        return "its grammar, sampling.allowed_token_ids and stopping.min_new_tokens leave no token"


def one_line(reason: str) -> str:
    """The part of the library's message that says what is wrong; it shows the source around that."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    told = (errors or lines or ["unknown"])[0]
    if told in ("NoExtension", "NoExtensionBias"):
        told = "no token of the model begins such a text"
    return re.sub(r"^at \d+\(\d+\): ", "", told)[:SHOWN]
