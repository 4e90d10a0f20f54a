"""The later kernels of a draw (sampling.py): candidates, sums of weights, what the filters leave of them.

The launchers are called with the arguments of sampling.sample, which it has checked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.checks import block
from ep_server.backends.gpu.kernels.triton.sampling_space import LOWEST, SamplingSpace
from ep_server.backends.gpu.kernels.triton.sampling_table import (
    DRAWN,
    DRAWS,
    FILTERS,
    FLOATS,
    LONGS,
    MIN_P,
    REPORTS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WANTS,
    SamplingTable,
)
from ep_server.backends.gpu.kernels.triton.sampling_weights import (
    block_of,
    drawn_of,
    integer,
    joined,
    least_cutoff,
    quarter_of,
    scaled,
    share_of,
    sum_of,
    total_weight,
)


@triton.jit
def _gather_kernel(
    logits, slots, floats, longs, highest, threshold, counts, listed, listed_ids, masses, ones, tokens, pitch,
    VOCAB: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + row).to(tl.int64)
    wants = tl.load(longs + slot * LONGS + WANTS)
    if ((wants & (FILTERS | REPORTS)) != 0) & (tl.load(tokens + row) >= 0):
        top, least = tl.load(highest + row), tl.load(threshold + row)
        temperature = tl.load(floats + slot * FLOATS + TEMPERATURE)
        mass = tl.zeros((BLOCK,), dtype=tl.int64)
        one = tl.zeros((BLOCK,), dtype=tl.int64)
        for start in range(split * BLOCK, VOCAB, splits * BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * pitch + token, mask=token < VOCAB, other=float("-inf"))
            x = x.to(tl.float32)
            mass += integer(tl.exp(scaled(x, top, temperature)))
            one += integer(tl.exp(x - top))
            hit = x >= least
            found = tl.sum(hit.to(tl.int32), axis=0)
            if found > 0:
                at = tl.atomic_add(counts + row, found) + tl.cumsum(hit.to(tl.int32), axis=0) - 1
                fits = hit & (at < MOST)
                tl.store(listed + row * MOST + at, x, mask=fits)
                tl.store(listed_ids + row * MOST + at, token, mask=fits)
        tl.store(masses + row * splits + split, tl.sum(mass, axis=0))
        tl.store(ones + row * splits + split, tl.sum(one, axis=0))


@triton.jit
def cutoff_of(
    values, length, highest, temperature, k, p, total, below, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """What top-k and top-p remove: weights below the cutoff; and whether `values` were enough to know.

    total: integer weight of the whole row. below: a weight that no other logit exceeds, negative = none.
    """
    limited = (k > 0) & (k < VOCAB)
    cutoff = tl.full((), 0.0, dtype=tl.float32)
    known = below < 0
    if limited:
        cutoff = least_cutoff(values, length, highest, temperature, 0.0, k, True, BLOCK)
        total = total_weight(values, length, highest, temperature, cutoff, BLOCK)
        known = known | (cutoff > below)
    if p < 1:
        limit = share_of(total, p)
        nucleus = least_cutoff(values, length, highest, temperature, cutoff, limit, False, BLOCK)
        known = known | ((nucleus > below) & (limited == 0))
        cutoff = tl.maximum(cutoff, nucleus)
    return cutoff, known


@triton.jit
def draw_kept(
    values, ids, length, highest, temperature, cutoff, setting, value_of, told, token,
    LISTED: tl.constexpr, VOCAB: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws among what top-k, top-p and min-p leave. cutoff: of cutoff_of().

    setting, value_of: the row's settings. told, token: where the cutoff of all three and the token go.
    """
    min_p, seed, position = tl.load(value_of + MIN_P), tl.load(setting + SEED), tl.load(setting + DRAWN)
    cutoff = tl.minimum(tl.maximum(cutoff, min_p), 1.0)  # the likeliest always stays
    tl.store(told, cutoff)
    drawn = drawn_of(
        values, ids, length, highest, temperature, cutoff, seed, position, LISTED, VOCAB, QUARTER, BLOCK
    )
    tl.store(token, drawn.to(tl.int64))


@triton.jit(do_not_specialize=["splits"])
def _settle_kernel(
    slots, floats, longs, values, ids, highest, threshold, counts, listed, listed_ids, masses,
    open_rows, cutoffs, tokens, splits, VOCAB: tl.constexpr, QUARTER: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    setting, value_of = longs + slot * LONGS, floats + slot * FLOATS
    wants, fine = tl.load(setting + WANTS), tl.load(tokens + row) >= 0
    tl.store(open_rows + row, 0)
    if fine & ((wants & DRAWS) != 0):
        _, token = joined(values, ids, row, splits, VOCAB, SPLITS_BLOCK)
        tl.store(tokens + row, token.to(tl.int64))
    if fine & ((wants & FILTERS) != 0):
        top, temperature = tl.load(highest + row), tl.load(value_of + TEMPERATURE)
        k, p = tl.load(setting + TOP_K), tl.load(value_of + TOP_P)
        least, count = tl.load(threshold + row), tl.load(counts + row)
        total = sum_of(masses, row, splits, SPLITS_BLOCK)
        few, few_ids = listed + row * MOST, listed_ids + row * MOST
        below = tl.where(least > LOWEST, tl.exp(scaled(least, top, temperature)), -1.0)
        known = count <= MOST
        if known:
            cutoff, known = cutoff_of(few, count, top, temperature, k, p, total, below, VOCAB, BLOCK)
            if known:
                draw_kept(
                    few, few_ids, count, top, temperature, cutoff, setting, value_of, cutoffs + row,
                    tokens + row, True, VOCAB, QUARTER, BLOCK,
                )  # fmt: skip
        tl.store(open_rows + row, (known == 0).to(tl.int32))


def gather(
    logits: torch.Tensor,
    slots: torch.Tensor,
    table: SamplingTable,
    space: SamplingSpace,
    tokens: torch.Tensor,
) -> None:
    """Lists the candidates of rows with filters or log probabilities, and adds up their weights."""
    count, vocab = logits.shape
    s = space
    _gather_kernel[(count, s.splits)](
        logits, slots, table.floats, table.longs, s.highest, s.threshold, s.counts, s.listed, s.listed_ids,
        s.masses, s.ones, tokens, logits.stride(0),
        VOCAB=vocab, MOST=s.most, BLOCK=min(block_of(vocab), 512), num_warps=4,
    )  # fmt: skip


def settle(
    vocab: int, slots: torch.Tensor, table: SamplingTable, space: SamplingSpace, tokens: torch.Tensor
) -> None:
    """The tokens of random rows; where candidates are not enough, the row is left open."""
    s = space
    _settle_kernel[(len(tokens),)](
        slots, table.floats, table.longs, s.values, s.ids, s.highest, s.threshold, s.counts, s.listed,
        s.listed_ids, s.masses, s.open_rows, s.cutoff, tokens, s.splits,
        VOCAB=vocab, QUARTER=quarter_of(vocab), MOST=s.most, BLOCK=min(block_of(vocab), 512),
        SPLITS_BLOCK=block(s.splits), num_warps=8,
    )  # fmt: skip
