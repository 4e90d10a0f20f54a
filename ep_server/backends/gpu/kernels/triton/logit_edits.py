"""Kernels that change logits before the draw, and that count what was drawn.

    penalise     repetition, then frequency and presence, by the table's counts
    add_listed   logit_bias, and stop tokens while too few are drawn
    allow_only   every token that the slot's mask does not allow becomes -inf
    advance      the drawn tokens into the table, and to the host

The first three run in that order, as in the CPU sampler. Logits are [N, V] float32, edited in place; rows may
have a pitch. slots: [N] int32. A row without edits costs one program that reads its slot. A launcher raises
InternalError for another shape, dtype or layout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import after_previous, block, early, expect
from ep_server.backends.gpu.kernels.triton.sampling_table import (
    COUNT_STEP,
    DRAWN,
    FLOATS,
    FREQUENCY,
    LISTED,
    LONGS,
    MASKED,
    PENALISED,
    PRESENCE,
    REPETITION,
    WANTS,
    SamplingTable,
)

_BLOCK = 4096
_ROWS = 256


@triton.jit
def _penalise_kernel(logits, slots, floats, longs, counts, pitch, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (tl.load(longs + slot * LONGS + WANTS) & PENALISED) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < VOCAB
        word = tl.load(counts + slot * VOCAB + token, mask=inside, other=0)
        seen = inside & (word != 0)
        at = logits + row * pitch + token
        x = tl.load(at, mask=seen, other=0.0)
        drawn = word // COUNT_STEP
        values = floats + slot * FLOATS
        factor = tl.load(values + REPETITION)
        x = tl.where(x > 0, x / factor, x * factor)
        x -= tl.load(values + FREQUENCY) * drawn.to(tl.float32)
        x -= tl.where(drawn > 0, tl.load(values + PRESENCE), 0.0)
        tl.store(at, x, mask=seen)


@triton.jit
def _listed_kernel(
    logits, slots, longs, tokens, values, until, pitch, VOCAB: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.load(longs + slot * LONGS + LISTED).to(tl.int32)
    drawn = tl.load(longs + slot * LONGS + DRAWN)
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        listed, at = entry < count, slot * LENGTH + entry
        token = tl.load(tokens + at, mask=listed, other=0)
        early = drawn < tl.load(until + at, mask=listed, other=0)
        place = logits + row * pitch + token
        x = tl.load(place, mask=listed, other=0.0) + tl.load(values + at, mask=listed, other=0.0)
        x += tl.where(early, float("-inf"), 0.0)  # added, not filled in: NaN stays NaN
        tl.store(place, x, mask=listed & (token < VOCAB))


@triton.jit
def _allow_kernel(
    logits, slots, longs, masks, pitch, VOCAB: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (tl.load(longs + slot * LONGS + WANTS) & MASKED) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < VOCAB
        word = tl.load(masks + slot * WORDS + token // 32, mask=inside, other=-1)
        banned = inside & (((word >> (token % 32)) & 1) == 0)
        at = logits + row * pitch + token
        x = tl.load(at, mask=banned, other=0.0) + float("-inf")  # added, as above
        tl.store(at, x, mask=banned)


@triton.jit(do_not_specialize=["rows"])
def _advance_kernel(
    drawn, slots, longs, counts, host_tokens, rows,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=0).to(tl.int64)
    token = tl.load(drawn + row, mask=row < rows, other=-1)
    tl.store(host_tokens + row, token, mask=row < rows)
    real = (row < rows) & (token >= 0) & (token < VOCAB)
    line = longs + slot * LONGS  # a slot is in one row: no atomics
    tl.store(line + DRAWN, tl.load(line + DRAWN, mask=real, other=0) + 1, mask=real)
    counted = real & ((tl.load(line + WANTS, mask=real, other=0) & PENALISED) != 0)
    at = counts + slot * VOCAB + token
    tl.store(at, tl.load(at, mask=counted, other=0) + COUNT_STEP, mask=counted)


def penalise(logits: torch.Tensor, slots: torch.Tensor, table: SamplingTable) -> None:
    """Applies the penalties of rows that have some."""
    rows, vocab = _checked(logits, slots, table)
    size = min(block(vocab), _BLOCK)
    if logits.numel():
        _penalise_kernel[(rows, -(-vocab // size))](
            logits, slots, table.floats, table.longs, table.counts, logits.stride(0),
            VOCAB=vocab, BLOCK=size, num_warps=4,
        )  # fmt: skip


def add_listed(logits: torch.Tensor, slots: torch.Tensor, table: SamplingTable) -> None:
    """Adds the entries of each row's list; an entry bans its token while fewer than `until` are drawn."""
    rows, vocab = _checked(logits, slots, table)
    length = table.tokens.shape[1]
    if logits.numel():
        _listed_kernel[(rows,)](
            logits, slots, table.longs, table.tokens, table.values, table.until, logits.stride(0),
            VOCAB=vocab, LENGTH=length, BLOCK=min(block(length), 256), num_warps=4,
        )  # fmt: skip


def allow_only(logits: torch.Tensor, slots: torch.Tensor, table: SamplingTable) -> None:
    """Bans what the masks of rows that have one do not allow."""
    rows, vocab = _checked(logits, slots, table)
    size = min(block(vocab), _BLOCK)
    if logits.numel():
        _allow_kernel[(rows, -(-vocab // size))](
            logits, slots, table.longs, table.masks, logits.stride(0),
            VOCAB=vocab, WORDS=table.masks.shape[1], BLOCK=size, num_warps=4,
        )  # fmt: skip


def advance(
    drawn: torch.Tensor, slots: torch.Tensor, table: SamplingTable, host_tokens: torch.Tensor
) -> None:
    """Counts the drawn tokens and copies them to the host.

    Args:
        drawn: [N] int64, negative = none. slots: [N] int32, distinct.
        host_tokens: [N] int64, becomes `drawn`. In pinned memory, so that no copy follows the step.
    """
    expect("drawn", drawn, torch.int64, (None,))
    expect("host_tokens", host_tokens, torch.int64, (len(drawn),))
    expect("slots", slots, torch.int32, (len(drawn),))
    if len(drawn):
        _advance_kernel[(-(-len(drawn) // _ROWS),)](
            drawn, slots, table.longs, table.counts, host_tokens, len(drawn),
            VOCAB=table.counts.shape[1], BLOCK=_ROWS, **early(drawn, lets_next_start=True), num_warps=4,
        )  # fmt: skip


def _checked(logits: torch.Tensor, slots: torch.Tensor, table: SamplingTable) -> tuple[int, int]:
    """Rows and tokens."""
    expect("logits", logits, torch.float32, (None, None), pitch=True)
    rows, vocab = logits.shape
    expect("slots", slots, torch.int32, (rows,))
    table.check(vocab)
    return rows, vocab
