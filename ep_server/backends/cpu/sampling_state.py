"""What one request carries from token to token: its uniforms, its token counts, its position.

Knows one request at a time; never sees logits. All tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_server.errors import InvalidArgument
from ep_server.records import Request

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
