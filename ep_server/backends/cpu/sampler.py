"""[9] Draws the next token of every sequence of a step from its logits.

The order is: penalties (repetition, then frequency and presence), logit bias, masks (min_new_tokens,
allowed_token_ids, grammar), temperature, top-k, top-p, min-p, draw. Log probabilities are read before the
temperature. A sequence's draws depend on its own seed and position only. Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ep_server.backends.cpu import sampling_ops as ops
from ep_server.errors import InternalError, InvalidArgument
from ep_server.records import NO_TOKEN, Request, SampledToken

_DRAWS_AHEAD = 64  # uniforms taken from a generator at a time


class UniformStream:
    """Uniform numbers of one request by output position, from its own generator: same seed, same numbers."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._chunk: list[float] = []
        self._end = 0  # position after the last one of _chunk

    def at(self, position: int) -> float:
        """The float64 in [0, 1) of a position; positions may be skipped, not taken back."""
        while position >= self._end:
            draws = torch.rand(_DRAWS_AHEAD, generator=self._generator, dtype=torch.float64)
            self._chunk = draws.tolist()
            self._end += _DRAWS_AHEAD
        return self._chunk[position - self._end]


class TokenCounts:
    """Distinct tokens of one request and how often each is in its output; grows one token at a time."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt_ids))
        self._slot_of = {token: slot for slot, token in enumerate(distinct)}
        self._ids = torch.tensor(distinct, dtype=torch.int64)
        self._counts = torch.zeros(len(distinct))

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def ids(self) -> torch.Tensor:
        """[len] int64, the distinct tokens; a view."""
        return self._ids[: len(self)]

    @property
    def counts(self) -> torch.Tensor:
        """[len] float32, how often each is in the output; a view."""
        return self._counts[: len(self)]

    def add(self, token: int) -> None:
        """Counts one token of the output."""
        slot = self._slot_of.get(token)
        if slot is None:
            slot = self._slot_of[token] = len(self)
            if slot == len(self._ids):  # storage doubles, so a long output does not copy it every time
                grow = max(16, slot)
                self._ids = torch.cat([self._ids, self._ids.new_zeros(grow)])
                self._counts = torch.cat([self._counts, self._counts.new_zeros(grow)])
            self._ids[slot] = token
        self._counts[slot] += 1


class SamplingStream:
    """One request in the sampler.

    position: tokens drawn so far. uniforms: None if greedy. counts: None if no penalty is set.
    bias_ids, bias: [B] int64, float32. stop_ids: [S] int64, masked while position < min_new_tokens.
    banned: [S] float32, -inf. disallowed: [V] float32, -inf for a token that is not allowed, else 0; or None.
    edits: its logits are changed before a token is chosen. filters: top-k, top-p or min-p is set.
    """

    __slots__ = (
        "banned",
        "bias",
        "bias_ids",
        "counts",
        "disallowed",
        "edits",
        "filters",
        "min_new_tokens",
        "position",
        "sampling",
        "stop_ids",
        "uniforms",
    )

    def __init__(self, request: Request, output: Sequence[int], vocab_size: int) -> None:
        """Raises: InvalidArgument for a random request without a seed or an id outside the vocabulary."""
        sampling, stopping = request.sampling, request.stopping
        if not sampling.greedy and sampling.seed is None:
            raise InvalidArgument("seed", None, "an integer once the request is on a rank")
        self.sampling = sampling
        self.position = len(output)
        self.uniforms = None if sampling.seed is None or sampling.greedy else UniformStream(sampling.seed)
        self.counts: TokenCounts | None = None
        repeats = sampling.repetition_penalty != 1.0
        if repeats or sampling.presence_penalty or sampling.frequency_penalty:
            self.counts = TokenCounts(request.prompt_ids if repeats else ())
            for token in output:
                self.counts.add(token)
        bias = dict(sampling.logit_bias)
        self.bias_ids = _id_tensor("logit_bias", list(bias), vocab_size)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        self.min_new_tokens = stopping.min_new_tokens
        stops = sorted(stopping.eos_token_ids | stopping.stop_token_ids) if self.min_new_tokens else []
        self.stop_ids = _id_tensor("stop_token_ids", stops, vocab_size)
        self.banned = torch.full((len(stops),), float("-inf"))
        self.disallowed: torch.Tensor | None = None
        if sampling.allowed_token_ids:
            allowed = _id_tensor("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
            self.disallowed = torch.full((vocab_size,), float("-inf")).index_fill_(0, allowed, 0.0)
        changed = self.counts is not None or self.disallowed is not None
        self.edits = changed or bool(bias) or bool(stops)
        self.filters = bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)

    @property
    def stops_masked(self) -> bool:
        """Its next token may not be a stop."""
        return self.position < self.min_new_tokens and len(self.stop_ids) > 0

    def push(self, token: int) -> None:
        """Takes the token it drew."""
        self.position += 1
        if self.counts is not None:
            self.counts.add(token)


def _id_tensor(field: str, ids: Sequence[int], vocab_size: int) -> torch.Tensor:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidArgument(field, token, f"a token id, 0 to {vocab_size - 1}")
    return torch.tensor(ids, dtype=torch.int64)


_Reported = tuple[float, tuple[tuple[int, float], ...]]  # logprob of the chosen token, alternatives


class Sampler:
    """Per-request sampling over a batch. One thread calls it.

    A request is added once and removed at its end; preemption needs nothing, because what is kept goes by
    output position. Tokens depend on the request's own logits and seed only, never on the rest of the batch.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._streams: dict[int, SamplingStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __repr__(self) -> str:
        return f"Sampler(requests={len(self)}, vocab={self.vocab_size}, device={self.device})"

    def add(self, request: Request, output: Sequence[int] = ()) -> None:
        """Starts the stream of a request.

        Args:
            output: tokens it drew elsewhere; the stream continues after them.
        Raises:
            InvalidArgument: it draws at random without a seed, or names an id outside the vocabulary.
            InternalError: its number is in use.
        """
        if request.number in self._streams:
            raise InternalError(f"request number {request.number} is already in the sampler")
        self._streams[request.number] = SamplingStream(request, output, self.vocab_size)

    def remove(self, number: int) -> None:
        """Forgets a request; unknown numbers are ignored."""
        self._streams.pop(number, None)

    def plain(self, number: int) -> bool:
        """Whether a request neither edits its logits nor asks for log probabilities."""
        stream = self._streams[number]
        return not stream.edits and stream.sampling.logprobs is None

    def sample(
        self, numbers: Sequence[int], logits: torch.Tensor, masks: Mapping[int, np.ndarray] | None = None
    ) -> list[SampledToken]:
        """Draws one token for each row.

        Args:
            numbers: N distinct request numbers, all added before.
            logits: [N, V] floating point, on the sampler's device; not changed.
            masks: of requests that a grammar constrains, by number: [ceil(V / 32)] int32, bit t % 32 of word
              t / 32 allows token t.
        Returns: N tokens in the order of `numbers`; NO_TOKEN for a row with NaN, +inf or nothing finite.
        Raises: InternalError for an unknown number or a wrong shape.
        """
        if logits.shape != (len(numbers), self.vocab_size):
            raise InternalError(
                f"logits of shape {tuple(logits.shape)} for {len(numbers)} rows of {self.vocab_size}"
            )
        try:
            streams = [self._streams[number] for number in numbers]
        except KeyError as error:
            raise InternalError(f"request number {error} is not in the sampler") from None
        if not streams:
            return []
        given = logits
        if masks or any(s.edits for s in streams):
            logits = self._edited(streams, logits)
            for row, number in enumerate(numbers if masks else ()):
                if masks and number in masks:
                    logits[row] += self._disallowed(masks[number])
        maxima, chosen = ops.argmax_rows(logits)
        if not bool(maxima.isfinite().all()):
            return self._without_broken(numbers, given, maxima.isfinite(), masks)
        if not all(s.sampling.greedy for s in streams):
            self._draw(streams, logits, maxima, chosen)
        tokens: list[int] = chosen.tolist()
        for stream, token in zip(streams, tokens, strict=True):
            stream.push(token)
        if all(s.sampling.logprobs is None for s in streams):
            return [SampledToken(number, token) for number, token in zip(numbers, tokens, strict=True)]
        reported = self._logprobs(streams, logits, chosen)
        return [
            SampledToken(number, token, *reported.get(row, (None, ())))
            for row, (number, token) in enumerate(zip(numbers, tokens, strict=True))
        ]

    def _without_broken(
        self,
        numbers: Sequence[int],
        logits: torch.Tensor,
        fine: torch.Tensor,
        masks: Mapping[int, np.ndarray] | None,
    ) -> list[SampledToken]:
        """Draws for the rows that allow it: a row that does not is its own request's misfortune only."""
        kept = [number for number, ok in zip(numbers, fine.tolist(), strict=True) if ok]
        drawn = {token.number: token for token in self.sample(kept, logits[fine], masks)}
        return [drawn.get(number, SampledToken(number, NO_TOKEN)) for number in numbers]

    def _edited(self, streams: Sequence[SamplingStream], logits: torch.Tensor) -> torch.Tensor:
        """A float32 copy with penalties, bias and masks applied."""
        logits = logits.to(torch.float32, copy=True)
        counted = [(row, s.counts.ids, s.counts.counts) for row, s in enumerate(streams) if s.counts]
        if counted:
            settings = [s.sampling for s in streams]
            ops.penalize(
                logits,
                ops.TokenList.of(counted, self.device),
                repetition=self._floats([s.repetition_penalty for s in settings]),
                presence=self._floats([s.presence_penalty for s in settings]),
                frequency=self._floats([s.frequency_penalty for s in settings]),
            )
        biased = [(row, s.bias_ids, s.bias) for row, s in enumerate(streams) if len(s.bias)]
        if biased:
            ops.add_bias(logits, ops.TokenList.of(biased, self.device))
        masked = [(row, s.stop_ids, s.banned) for row, s in enumerate(streams) if s.stops_masked]
        if masked:
            ops.add_bias(logits, ops.TokenList.of(masked, self.device))
        for row, stream in enumerate(streams):
            if stream.disallowed is not None:  # added, not filled in: NaN stays NaN
                logits[row] += stream.disallowed.to(self.device)
        return logits

    def _disallowed(self, mask: np.ndarray) -> torch.Tensor:
        """[V] float32, -inf for a token that a mask does not allow, else 0."""
        bits = np.unpackbits(mask.view(np.uint8), count=self.vocab_size, bitorder="little")
        return torch.from_numpy(np.where(bits, np.float32(0), np.float32("-inf"))).to(self.device)

    def _draw(
        self,
        streams: Sequence[SamplingStream],
        logits: torch.Tensor,
        maxima: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """Replaces the entries of `chosen` whose request draws at random."""
        drawing = [(row, s, s.uniforms) for row, s in enumerate(streams) if s.uniforms is not None]
        rows = self._index([row for row, _, _ in drawing], len(streams))
        uniforms = [uniforms.at(s.position) for _, s, uniforms in drawing]
        settings = [s.sampling for _, s, _ in drawing]
        weights = ops.relative_weights(
            logits[rows].float(), maxima[rows].float(), self._floats([s.temperature for s in settings])
        )
        filtered = [index for index, (_, s, _) in enumerate(drawing) if s.filters]
        if filtered:
            index = self._index(filtered, len(drawing))
            some = weights[index]
            ops.filter_weights(
                some,
                top_k=torch.tensor([settings[i].top_k for i in filtered], device=self.device),
                top_p=self._floats([settings[i].top_p for i in filtered]),
                min_p=self._floats([settings[i].min_p for i in filtered]),
            )
            if len(filtered) < len(drawing):  # else `some` is `weights`
                weights[index] = some
        chosen[rows] = ops.draw(weights, torch.tensor(uniforms, dtype=torch.float64, device=self.device))

    def _logprobs(
        self, streams: Sequence[SamplingStream], logits: torch.Tensor, chosen: torch.Tensor
    ) -> dict[int, _Reported]:
        """What to report, by row, for the rows that asked."""
        rows_of: dict[int, list[int]] = {}
        for row, stream in enumerate(streams):
            if stream.sampling.logprobs is not None:
                rows_of.setdefault(stream.sampling.logprobs, []).append(row)
        reported: dict[int, _Reported] = {}
        for count, rows in rows_of.items():
            index = self._index(rows, len(streams))
            logprobs = logits[index].float().log_softmax(-1)
            own = logprobs.gather(1, chosen[index, None])[:, 0].tolist()
            top = logprobs.topk(min(count, self.vocab_size), dim=-1)
            for row, logprob, ids, values in zip(
                rows, own, top.indices.tolist(), top.values.tolist(), strict=True
            ):
                reported[row] = (logprob, tuple(zip(ids, values, strict=True)))
        return reported

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _index(self, rows: list[int], of: int) -> slice | torch.Tensor:
        """Rows as an index; a slice, which copies nothing, where it is all of them."""
        return slice(None) if len(rows) == of else torch.tensor(rows, device=self.device)
