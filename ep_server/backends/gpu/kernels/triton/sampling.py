"""[9] Draws the next token of every row on the device: greedy, or by temperature, top-k, top-p and min-p.

The order is that of model/sampler.py, after the edits of logit_edits.py: temperature, top-k, top-p of what
is left, min-p, draw. Greedy takes the lowest id of the highest logit, exactly. A random row takes its token
from noise of its own seed and position (sampling_weights.py); the distribution is the CPU sampler's, the
tokens are not. A row with NaN or +inf, or nothing finite, gets NO_TOKEN, as does padding made of NaN.

    peak     (row, split)  highest logit of a part of the vocabulary, and of groups of it
    join     row           joins the parts: greedy tokens, and a logit that few enough reach: a candidate's
    draw     (row, split)  highest key of a part; rows without top-k and top-p
    gather   (row, split)  candidates and sums of weights; rows with top-k, top-p or log probabilities
    settle   row           joins what draw has left, or filters and draws among the candidates

    close    row           a row whose filters keep more than the candidates: sampling_nucleus.py

Such a row is one of top-k beyond about 900, of a nucleus beyond 500 tokens, or of thousands of equal logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.checks import FLOATS as FLOAT_TYPES
from ep_server.backends.gpu.kernels.triton.checks import block, expect
from ep_server.backends.gpu.kernels.triton.early import after_previous, early
from ep_server.backends.gpu.kernels.triton.sampling_filters import gather, settle
from ep_server.backends.gpu.kernels.triton.sampling_nucleus import close
from ep_server.backends.gpu.kernels.triton.sampling_space import LOWEST, SamplingSpace
from ep_server.backends.gpu.kernels.triton.sampling_table import (
    DRAWN,
    DRAWS,
    FILTERS,
    FLOATS,
    LONGS,
    MIN_P,
    REPORTED,
    REPORTS,
    SEED,
    TEMPERATURE,
    TOP_K,
    WANTS,
    SamplingTable,
    Wants,
)
from ep_server.backends.gpu.kernels.triton.sampling_weights import (
    best_of,
    block_of,
    joined,
    keep_better,
    keys_of,
    noise,
    nothing,
    quarter_of,
)

_NUCLEUS = tl.constexpr(512)  # groups whose highest logits are candidates where only top-p is set
_TRIED = tl.constexpr(8)


@triton.jit
def _peak_kernel(
    logits, values, ids, peaks, pitch,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    best, best_id = nothing(BLOCK, VOCAB)
    for start in range(split * BLOCK, VOCAB, splits * BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * pitch + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124  NaN is no better than +inf: the row is broken
        best, best_id = keep_better(best, best_id, x, token)
    value, token = best_of(best, best_id, VOCAB)
    tl.store(values + row * splits + split, value)
    tl.store(ids + row * splits + split, token)
    group = tl.max(tl.reshape(best, (GROUPS, BLOCK // GROUPS)), axis=1)
    tl.store(peaks + (row * splits + split) * GROUPS + tl.arange(0, GROUPS), group)


@triton.jit
def _threshold(peaks, highest, wanted, groups, PEAKS_BLOCK: tl.constexpr):
    """A logit that at least `wanted` groups reach and few more; LOWEST where fewer have a finite one."""
    group = tl.arange(0, PEAKS_BLOCK)
    peak = tl.load(peaks + group, mask=group < groups, other=float("-inf"))
    finite = peak > float("-inf")
    low = tl.min(tl.where(finite, peak, highest), axis=0)
    step = highest / _TRIED - low / _TRIED
    index = tl.arange(0, _TRIED)
    for _ in range(5):  # 2^15 parts of the range
        tried = low + step * index.to(tl.float32)
        reach = tl.sum((peak[None, :] >= tried[:, None]).to(tl.int32), axis=1)
        found = tl.sum((reach >= wanted).to(tl.int32), axis=0)
        low += step * tl.maximum(found - 1, 0).to(tl.float32)
        step /= _TRIED
    return tl.where(tl.sum(finite.to(tl.int32), axis=0) < wanted, LOWEST, low)


@triton.jit(do_not_specialize=["splits", "groups"])
def _join_kernel(
    slots, floats, longs, values, ids, peaks, highest, threshold, counts, tokens, splits, groups,
    VOCAB: tl.constexpr, ALL: tl.constexpr, SPLITS_BLOCK: tl.constexpr, PEAKS_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    top, token = joined(values, ids, row, splits, VOCAB, SPLITS_BLOCK)
    fine = (top > float("-inf")) & (top < float("inf"))
    tl.store(highest + row, top)
    tl.store(tokens + row, tl.where(fine, token, -1).to(tl.int64))
    setting = longs + tl.load(slots + row).to(tl.int64) * LONGS
    wants = tl.load(setting + WANTS)
    if fine & ((wants & (FILTERS | REPORTS)) != 0):
        wanted = tl.load(setting + REPORTED) + 8
        if (wants & FILTERS) != 0:
            k = tl.load(setting + TOP_K)
            limited = (k > 0) & (k < VOCAB)
            wanted = tl.maximum(wanted, tl.where(limited, k + k // 8 + 8, _NUCLEUS))
        wanted = tl.minimum(wanted, groups // 2).to(tl.int32)
        tl.store(counts + row, 0)
        if ALL:
            tl.store(threshold + row, LOWEST)
        else:
            line = peaks + row * groups
            tl.store(threshold + row, _threshold(line, top, wanted, groups, PEAKS_BLOCK))


@triton.jit
def _draw_kernel(
    logits, slots, floats, longs, values, ids, highest, tokens, pitch,
    VOCAB: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + row).to(tl.int64)
    setting, value_of = longs + slot * LONGS, floats + slot * FLOATS
    if ((tl.load(setting + WANTS) & DRAWS) != 0) & (tl.load(tokens + row) >= 0):
        top, temperature = tl.load(highest + row), tl.load(value_of + TEMPERATURE)
        cutoff = tl.minimum(tl.load(value_of + MIN_P), 1.0)  # the likeliest always stays
        seed, position = tl.load(setting + SEED), tl.load(setting + DRAWN)
        best, best_id = nothing(BLOCK, VOCAB)
        for start in range(split * BLOCK, QUARTER, splits * BLOCK):
            quad = start + tl.arange(0, BLOCK)
            variates = noise(seed, position, quad, QUARTER)
            for part in tl.static_range(4):
                key, token = keys_of(
                    logits + row * pitch, quad, variates[part], top, temperature, cutoff, part, VOCAB, QUARTER
                )
                best, best_id = keep_better(best, best_id, key, token)
        value, token = best_of(best, best_id, VOCAB)
        tl.store(values + row * splits + split, value)
        tl.store(ids + row * splits + split, token)


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    table: SamplingTable,
    space: SamplingSpace,
    tokens: torch.Tensor,
    wants: Wants,
) -> None:
    """Draws one token per row; the table is not changed.

    Args:
        logits: [N, V], rows may have a pitch; not changed. slots: [N] int32, rows of the table.
        tokens: [N] int64, NO_TOKEN (-1) for a broken row.
        wants: at least what any of the rows wants; greedy rows want nothing.
    Raises: InternalError for another shape, dtype or layout.
    """
    expect("logits", logits, FLOAT_TYPES, (None, None), pitch=True)
    count, vocab = logits.shape
    expect("slots", slots, torch.int32, (count,))
    expect("tokens", tokens, torch.int64, (count,))
    table.check(vocab)
    space.check(count, vocab)
    if count == 0 or vocab == 0:
        return
    splits, size, pitch = space.splits, block_of(vocab), logits.stride(0)
    groups = space.peaks.shape[2]
    s, given = space, (slots, table.floats, table.longs)
    _peak_kernel[(count, splits)](
        logits, s.values, s.ids, s.peaks, pitch,
        VOCAB=vocab, GROUPS=groups, BLOCK=size, **early(tokens), num_warps=4,
    )  # fmt: skip
    _join_kernel[(count,)](
        *given, s.values, s.ids, s.peaks, s.highest, s.threshold, s.counts, tokens, splits, splits * groups,
        VOCAB=vocab, ALL=vocab <= space.most, SPLITS_BLOCK=block(splits), PEAKS_BLOCK=block(splits * groups),
        **early(tokens, lets_next_start=True), num_warps=8,
    )  # fmt: skip
    if wants & Wants.DRAW:
        _draw_kernel[(count, splits)](
            logits, *given, s.values, s.ids, s.highest, tokens, pitch,
            VOCAB=vocab, QUARTER=quarter_of(vocab), BLOCK=min(size, 512), num_warps=4,
        )  # fmt: skip
    if wants & (Wants.FILTER | Wants.REPORT):
        gather(logits, slots, table, space, tokens)
    if wants & (Wants.DRAW | Wants.FILTER):
        settle(vocab, slots, table, space, tokens)
    if wants & Wants.FILTER:
        close(logits, slots, table, space, tokens, race=bool(wants & Wants.NUCLEUS))
