"""[9] Draws the next token of every sequence of a step from its logits.

Knows requests by number and one row of logits each; nothing of how the batch was chosen, of text, or of
stop rules beyond min_new_tokens. Order: penalties (repetition, then frequency and presence), logit bias,
masks (min_new_tokens, allowed_token_ids), (log probabilities are read here), temperature, top-k, top-p,
min-p, draw.
Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_server.backends.cpu import sampling_ops as ops
from ep_server.backends.cpu.sampling_state import SamplingStream
from ep_server.errors import InternalError
from ep_server.records import NO_TOKEN, Request, SampledToken

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

    def sample(self, numbers: Sequence[int], logits: torch.Tensor) -> list[SampledToken]:
        """Draws one token for each row.

        Args:
            numbers: N distinct request numbers, all added before.
            logits: [N, V] floating point, on the sampler's device; not changed.
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
        if any(s.edits for s in streams):
            logits = self._edited(streams, logits)
        maxima, chosen = ops.argmax_rows(logits)
        if not bool(maxima.isfinite().all()):
            return self._without_broken(numbers, given, maxima.isfinite())
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
        self, numbers: Sequence[int], logits: torch.Tensor, fine: torch.Tensor
    ) -> list[SampledToken]:
        """Draws for the rows that allow it: a row that does not is its own request's misfortune only."""
        kept = [number for number, ok in zip(numbers, fine.tolist(), strict=True) if ok]
        drawn = {token.number: token for token in self.sample(kept, logits[fine])}
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
