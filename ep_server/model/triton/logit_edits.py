"""What changes logits before a token is drawn, from tables on the device; and the counting of what was drawn.

    penalise       repetition, then frequency and presence, by a table of token counts
    add_bias       a list of (token, bias, until) per slot: logit_bias, stop tokens while too few are drawn
    allow_only     a bit mask per slot: every other token becomes -inf
    count_tokens   the drawn tokens into the table

The order of the first three is that of model/sampler.py. Tables are by slot, which a request keeps for its
life; a row whose slot is -1 asks for nothing, and costs a program that reads its slot. Logits are float32,
in place. A count is one word per token of the vocabulary: twice the times it was drawn, plus 1 if it is in
the prompt and the prompt counts (with a repetition penalty).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.model.triton.checks import block, expect

_BLOCK = 4096
COUNT_STEP = 2  # of a word, for each time a token was drawn
IN_PROMPT = 1


@dataclass(frozen=True, slots=True)
class Penalties:
    """counts: [slots, V] int32. slots: [N] int32, -1 = none. The rest: [N] float32; 1, 0, 0 are "off"."""

    counts: torch.Tensor
    slots: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


@dataclass(frozen=True, slots=True)
class BiasLists:
    """tokens: [slots, B] int32, distinct in a slot, -1 = unused. values: [slots, B] float32, -inf bans.

    until: [slots, B] int64: an entry holds while the row's position is below it. slots: [N] int32, -1 = none.
    """

    tokens: torch.Tensor
    values: torch.Tensor
    until: torch.Tensor
    slots: torch.Tensor


@triton.jit
def _penalise_kernel(
    logits, counts, slots, repetition, presence, frequency, pitch, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < VOCAB
        word = tl.load(counts + slot * VOCAB + token, mask=inside, other=0)
        seen = inside & (word != 0)
        at = logits + row * pitch + token
        x = tl.load(at, mask=seen, other=0.0)
        drawn = word >> 1
        factor = tl.load(repetition + row)
        x = tl.where(x > 0, x / factor, x * factor)
        x -= tl.load(frequency + row) * drawn.to(tl.float32)
        x -= tl.where(drawn > 0, tl.load(presence + row), 0.0)
        tl.store(at, x, mask=seen)


@triton.jit
def _bias_kernel(
    logits, tokens, values, until, slots, positions, pitch, VOCAB: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        entry = tl.arange(0, BLOCK)
        at = slot * LENGTH + entry
        token = tl.load(tokens + at, mask=entry < LENGTH, other=-1)
        holds = (token >= 0) & (token < VOCAB)
        holds &= tl.load(positions + row) < tl.load(until + at, mask=entry < LENGTH, other=0)
        x = tl.load(logits + row * pitch + token, mask=holds, other=0.0)
        x += tl.load(values + at, mask=holds, other=0.0)
        tl.store(logits + row * pitch + token, x, mask=holds)


@triton.jit
def _allow_kernel(logits, masks, slots, pitch, VOCAB: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < VOCAB
        word = tl.load(masks + slot * WORDS + token // 32, mask=inside, other=-1)
        banned = inside & (((word >> (token % 32)) & 1) == 0)
        at = logits + row * pitch + token
        x = tl.load(at, mask=banned, other=0.0) + float("-inf")  # added, not filled in: NaN stays NaN
        tl.store(at, x, mask=banned)


@triton.jit(do_not_specialize=["rows"])
def _count_kernel(tokens, counts, slots, rows, VOCAB: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    token = tl.load(tokens + row, mask=row < rows, other=-1)
    at = counts + slot * VOCAB + token
    real = (slot >= 0) & (token >= 0) & (token < VOCAB)
    tl.store(at, tl.load(at, mask=real, other=0) + STEP, mask=real)  # a slot is in one row: no atomics


def penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    """Applies the penalties of every row that has a slot. logits: [N, V] float32, rows may have a pitch.

    Raises: InternalError for another shape, dtype or layout.
    """
    rows, vocab = logits.shape
    expect("logits", logits, torch.float32, (None, None), pitch=True)
    expect("counts", penalties.counts, torch.int32, (None, vocab))
    expect("slots", penalties.slots, torch.int32, (rows,))
    for name in ("repetition", "presence", "frequency"):
        expect(name, getattr(penalties, name), torch.float32, (rows,))
    size = min(block(vocab), _BLOCK)
    if logits.numel():
        _penalise_kernel[(rows, -(-vocab // size))](
            logits, penalties.counts, penalties.slots, penalties.repetition, penalties.presence,
            penalties.frequency, logits.stride(0), VOCAB=vocab, BLOCK=size, num_warps=4,
        )  # fmt: skip


def add_bias(logits: torch.Tensor, lists: BiasLists, positions: torch.Tensor) -> None:
    """Adds the entries that hold. logits: [N, V] float32. positions: [N] int64, tokens drawn before.

    Raises: InternalError for another shape, dtype or layout.
    """
    rows, vocab = logits.shape
    slots, length = lists.tokens.shape
    expect("logits", logits, torch.float32, (None, None), pitch=True)
    expect("tokens", lists.tokens, torch.int32, (None, None))
    expect("values", lists.values, torch.float32, (slots, length))
    expect("until", lists.until, torch.int64, (slots, length))
    expect("slots", lists.slots, torch.int32, (rows,))
    expect("positions", positions, torch.int64, (rows,))
    if logits.numel() and length:
        _bias_kernel[(rows,)](
            logits, lists.tokens, lists.values, lists.until, lists.slots, positions, logits.stride(0),
            VOCAB=vocab, LENGTH=length, BLOCK=block(length), num_warps=4,
        )  # fmt: skip


def allow_only(logits: torch.Tensor, masks: torch.Tensor, slots: torch.Tensor) -> None:
    """Bans what a row's mask does not allow.

    Args:
        logits: [N, V] float32. masks: [slots, ceil(V / 32)] int32, bit t % 32 of word t / 32 allows token t.
        slots: [N] int32, -1 = all are allowed.
    Raises: InternalError for another shape, dtype or layout.
    """
    rows, vocab = logits.shape
    words = -(-vocab // 32)
    expect("logits", logits, torch.float32, (None, None), pitch=True)
    expect("masks", masks, torch.int32, (None, words))
    expect("slots", slots, torch.int32, (rows,))
    size = min(block(vocab), _BLOCK)
    if logits.numel():
        _allow_kernel[(rows, -(-vocab // size))](
            logits, masks, slots, logits.stride(0), VOCAB=vocab, WORDS=words, BLOCK=size, num_warps=4
        )


def count_tokens(tokens: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor) -> None:
    """Counts what was drawn. tokens: [N] int64, negative = none. counts: [slots, V] int32. slots: [N] int32.

    Raises: InternalError for another shape, dtype or layout.
    """
    expect("tokens", tokens, torch.int64, (None,))
    expect("counts", counts, torch.int32, (None, None))
    expect("slots", slots, torch.int32, (len(tokens),))
    if len(tokens):
        size = min(block(len(tokens)), 256)
        _count_kernel[(-(-len(tokens) // size),)](
            tokens,
            counts,
            slots,
            len(tokens),
            VOCAB=counts.shape[1],
            STEP=COUNT_STEP,
            BLOCK=size,
            num_warps=4,
        )
