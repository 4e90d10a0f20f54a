"""Turns a StepBatch into the tensors that a forward pass reads, split into micro-batches.

Sequences that decode one token come first, so that attention can treat them as one group. Units: tokens,
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch

from ep_server.models.prompt_scorer import PromptScorer
from ep_server.records import ScoredRows, SeqSlice, StepBatch


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Where the tokens of a micro-batch stand; the same for all layers. S sequences, T tokens.

    num_decode: the first num_decode sequences have one token each, at row = sequence.
    query_start: S + 1 offsets of each sequence's rows. context: S, positions each attends to, its own
      included. blocks: [S, most blocks] int64, rows padded with 0. block_size: tokens.
    positions: [T] int64. slots: [T] int64, block * block_size + offset where each token's K and V go.
    """

    num_decode: int
    query_start: tuple[int, ...]
    context: tuple[int, ...]
    blocks: torch.Tensor
    block_size: int
    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """token_ids: [T] int64. sampled: request numbers that draw a token from row sample_rows[i]: int64.

    numbers: request numbers of the S sequences. scorer: of its prompt tokens, if any are to be scored.
    """

    token_ids: torch.Tensor
    attention: AttentionMeta
    sampled: tuple[int, ...]
    sample_rows: torch.Tensor
    numbers: tuple[int, ...]
    scorer: PromptScorer | None = None

    def row_numbers(self) -> torch.Tensor:
        """[T] int64, request number of each row."""
        lengths = torch.tensor(self.attention.query_start).diff()
        rows = torch.repeat_interleave(torch.tensor(self.numbers, dtype=torch.int64), lengths)
        return rows.to(self.token_ids.device)


def split(
    batch: StepBatch, count: int, block_size: int, device: torch.device | None = None
) -> list[MicroBatch]:
    """Cuts a step into `count` micro-batches of about equal tokens, some of them perhaps empty.

    A prefill chunk may be cut in two: the earlier part lies in an earlier micro-batch, which runs first in
    every layer, so the later part finds its keys and values.
    """
    parts = [_tensors(part.slices, block_size) for part in cut(batch, count, -(-batch.num_tokens // count))]
    return parts if device is None or device.type == "cpu" else [_moved(part, device) for part in parts]


def cut(batch: StepBatch, count: int, size: int) -> list[StepBatch]:
    """The first `size` tokens, the next `size` tokens ... and the rest: `count` steps, some perhaps empty.

    In the order of row_order(). See split() for chunks.
    """
    if count == 1:
        return [batch]
    rest, groups = sorted(batch.slices, key=row_order), []
    for _ in range(count - 1):
        group, rest = _take(rest, size)
        groups.append(group)
    return [StepBatch(tuple(g), sum(len(s.token_ids) for s in g)) for g in (*groups, rest)]


def row_order(piece: SeqSlice) -> tuple[bool, bool]:
    """Sort key of a step's rows: single tokens first, those that are sampled before the others."""
    return len(piece.token_ids) != 1, not piece.sample


def _moved(part: MicroBatch, device: torch.device) -> MicroBatch:
    at = part.attention
    attention = replace(
        at, blocks=at.blocks.to(device), positions=at.positions.to(device), slots=at.slots.to(device)
    )
    return replace(
        part,
        token_ids=part.token_ids.to(device),
        attention=attention,
        sample_rows=part.sample_rows.to(device),
    )


def _take(slices: list[SeqSlice], tokens: int) -> tuple[list[SeqSlice], list[SeqSlice]]:
    """Splits off the first `tokens` tokens."""
    for index, item in enumerate(slices):
        length = len(item.token_ids)
        if length > tokens:
            if tokens == 0:
                return slices[:index], slices[index:]
            at = item.start + tokens
            before, after = (None, None) if item.scored is None else _split(item.scored, at)
            head = replace(item, token_ids=item.token_ids[:tokens], sample=False, scored=before)
            tail = replace(item, token_ids=item.token_ids[tokens:], start=at, scored=after)
            return [*slices[:index], head], [tail, *slices[index + 1 :]]
        tokens -= length
    return slices, []


def _split(scored: ScoredRows, position: int) -> tuple[ScoredRows | None, ScoredRows | None]:
    """The rows before a position, and those from it on."""
    count = position - scored.start
    if count <= 0:
        return None, scored
    if count >= len(scored.targets):
        return scored, None
    parts = (scored.start, scored.targets[:count]), (position, scored.targets[count:])
    head, tail = (ScoredRows(*part, scored.top) for part in parts)
    return head, tail


def _tensors(slices: Sequence[SeqSlice], block_size: int) -> MicroBatch:
    # A chunk's remainder of one token decodes like any other; keep such sequences in front.
    slices = sorted(slices, key=row_order)
    lengths = [len(s.token_ids) for s in slices]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    context = [s.start + n for s, n in zip(slices, lengths, strict=True)]
    table = _block_table(slices, context, block_size)
    rows = torch.arange(starts[-1])
    if slices and max(lengths) > 1:
        sequence = torch.repeat_interleave(torch.arange(len(slices)), torch.tensor(lengths))
        shifts = [s.start - at for s, at in zip(slices, starts, strict=False)]
        positions = rows + torch.tensor(shifts)[sequence]
    else:
        sequence, positions = rows, torch.tensor([s.start for s in slices], dtype=torch.int64)
    slots = table[sequence, positions // block_size] * block_size + positions % block_size
    sampled = [i for i, s in enumerate(slices) if s.sample]
    return MicroBatch(
        token_ids=torch.tensor(list(chain.from_iterable(s.token_ids for s in slices)), dtype=torch.int64),
        attention=AttentionMeta(
            num_decode=sum(n == 1 for n in lengths),
            query_start=tuple(starts),
            context=tuple(context),
            blocks=table,
            block_size=block_size,
            positions=positions,
            slots=slots,
        ),
        sampled=tuple(slices[i].number for i in sampled),
        sample_rows=torch.tensor([starts[i + 1] - 1 for i in sampled], dtype=torch.int64),
        numbers=tuple(s.number for s in slices),
        scorer=PromptScorer.of(slices),
    )


def _block_table(slices: Sequence[SeqSlice], context: Sequence[int], block_size: int) -> torch.Tensor:
    counts = [-(-c // block_size) for c in context]
    width = max(counts, default=0)
    rows = [[*islice(s.blocks, n), *[0] * (width - n)] for s, n in zip(slices, counts, strict=True)]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(slices), width)
