"""Log probabilities of prompt tokens, from the logits of the rows before them.

The output head runs on a bounded number of rows at a time: logits of a whole chunk may not fit into memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ep_server.records import PromptLogprobs, ScoredRows, SeqSlice

MOST_ROWS = 64  # whose logits exist at once


@dataclass(frozen=True, slots=True)
class _Scores:
    """On the host once the device gets there. own: [N] float32. ids, top: [N, most alternatives]."""

    own: torch.Tensor
    ids: torch.Tensor
    top: torch.Tensor


class PromptScorer:
    """Scores the prompt tokens of one micro-batch. Use it once: score(), then results()."""

    def __init__(self, rows: Sequence[int], scored: Sequence[tuple[int, ScoredRows]]) -> None:
        """rows: N rows of the micro-batch. scored: what they score, with the number of the request."""
        self._rows, self._scored = rows, scored
        self._scores: _Scores | None = None

    @classmethod
    def of(cls, slices: Sequence[SeqSlice]) -> PromptScorer | None:
        """None where no slice has rows to score.

        Args:
            slices: in the order of their rows.
        """
        if all(piece.scored is None for piece in slices):
            return None
        rows, scored, first = list[int](), list[tuple[int, ScoredRows]](), 0
        for piece in slices:
            if piece.scored is not None:
                at = first + piece.scored.start - piece.start
                rows += range(at, at + len(piece.scored.targets))
                scored.append((piece.number, piece.scored))
            first += len(piece.token_ids)
        return cls(rows, scored)

    def score(self, logits_of: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Enqueues the work on the current stream.

        Args:
            logits_of: [n] rows of the micro-batch to their logits, [n, V] float32, which may be overwritten.
        """
        targets = [token for _, scored in self._scored for token in scored.targets]
        rows, wanted = (_sent(values, device) for values in (self._rows, targets))
        most = max(scored.top for _, scored in self._scored)
        parts = list[_Scores]()
        for first in range(0, len(rows), MOST_ROWS):
            part = slice(first, first + MOST_ROWS)
            logprobs = logits_of(rows[part]).log_softmax(-1)
            own = logprobs.gather(1, wanted[part, None])[:, 0]
            top = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
            parts.append(_Scores(own, top.indices.int(), top.values))
        self._scores = _Scores(
            *(_on_host(torch.cat(column)) for column in zip(*map(_columns, parts), strict=True))
        )

    def results(self) -> list[PromptLogprobs]:
        """One record per slice with scored rows. The device must have ended the work of score()."""
        assert self._scores is not None
        own, ids, top = (column.numpy() for column in _columns(self._scores))
        ends = [0]
        for _, scored in self._scored:
            ends.append(ends[-1] + len(scored.targets))
        return [
            PromptLogprobs(
                number,
                scored.start + 1,
                array("f", own[first:end].tobytes()),
                array("I", ids[first:end, : scored.top].astype("uint32").tobytes()),
                array("f", top[first:end, : scored.top].tobytes()),
            )
            for (number, scored), (first, end) in zip(self._scored, pairwise(ends), strict=True)
        ]


def _columns(scores: _Scores) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return scores.own, scores.ids, scores.top


def _sent(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """[N] int64 on the device, without a wait."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)


def _on_host(values: torch.Tensor) -> torch.Tensor:
    """A copy on the host, there once the stream gets to it."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
