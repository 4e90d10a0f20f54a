"""Draws the next token of every row on the device: greedy, or by temperature, top-k, top-p and min-p.

The order is that of the CPU sampler, after the edits of logit_edits.py: temperature, top-k, top-p of what is
left, min-p, draw. Greedy takes the lowest id of the highest logit, exactly. A random row draws with noise of
its own seed and position (sampling_filters.py): the distribution is the CPU sampler's, the tokens are not.
A row with NaN or +inf, or without a finite logit, gets NO_TOKEN. So does padding made of NaN.

    peak     (row, split)  highest logit of a part of the vocabulary, and of groups of it
    join     row           joins the parts: the greedy token, and the threshold for candidates
    draw     (row, split)  highest key of a part; rows without top-k and top-p
    gather   (row, split)  candidates and sums of weights; rows with top-k, top-p or log probabilities
    decide   row           joins the results of draw, or filters and draws among the candidates

The remaining kernels serve rows whose filters keep more than the candidates: top-k beyond about 900, a
nucleus of more than 500 tokens, or thousands of equal logits. For top-p, the draw is the token with the
highest key in the nucleus. The highest keys of the whole row are tried first: one is in the nucleus if the
weights above its own sum to less than the nucleus. A wide nucleus then needs no cutoff:

    race     (row, split)  the highest keys of a part, and a bound on all its others
    weigh    (row, split)  the weights above those of the row's LEADERS highest keys
    close    row           the first leader in the nucleus; if there is none, and for top-k, a full search

With top-p of 0.9, none of 8 leaders is in the nucleus once in 10^8 draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import FLOATS as FLOAT_TYPES
from ep_server.backends.gpu.kernels.triton.launch import after_previous, block, early, expect
from ep_server.backends.gpu.kernels.triton.sampling_filters import (
    best_of,
    cutoff_of,
    decide,
    draw_kept,
    gather,
    integer,
    joined,
    keep_better,
    keys_of,
    noise,
    nothing,
    scaled,
    share_of,
    sum_of,
)
from ep_server.backends.gpu.kernels.triton.sampling_table import (
    DRAWN,
    DRAWS,
    FILTERS,
    FLOATS,
    LEADERS,
    LONGS,
    LOWEST,
    MIN_P,
    NUCLEUS,
    REPORTED,
    REPORTS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WANTS,
    SamplingSpace,
    SamplingTable,
    Wants,
    block_of,
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
        decide(vocab, slots, table, space, tokens)
    if wants & Wants.FILTER:
        close(logits, slots, table, space, tokens, race=bool(wants & Wants.NUCLEUS))


@triton.jit
def _race_kernel(
    logits, slots, floats, longs, highest, open_rows, keys, key_ids, rest, pitch,
    VOCAB: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots + row).to(tl.int64)
    setting = longs + slot * LONGS
    if (tl.load(open_rows + row) != 0) & ((tl.load(setting + WANTS) & NUCLEUS) != 0):
        top, temperature = tl.load(highest + row), tl.load(floats + slot * FLOATS + TEMPERATURE)
        seed, position = tl.load(setting + SEED), tl.load(setting + DRAWN)
        best, best_id = nothing(BLOCK, VOCAB)
        others, _ = nothing(BLOCK, VOCAB)
        for start in range(split * BLOCK, QUARTER, splits * BLOCK):
            quad = start + tl.arange(0, BLOCK)
            variates = noise(seed, position, quad, QUARTER)
            for part in tl.static_range(4):
                key, token = keys_of(
                    logits + row * pitch, quad, variates[part], top, temperature, None, part, VOCAB, QUARTER
                )
                others = tl.maximum(others, tl.minimum(best, key))
                best, best_id = keep_better(best, best_id, key, token)
        at = (row * splits + split) * LEADERS
        for place in tl.static_range(LEADERS):
            key, token = best_of(best, best_id, VOCAB)
            tl.store(keys + at + place, key)
            tl.store(key_ids + at + place, token)
            best = tl.where(best_id == token, float("-inf"), best)
        tl.store(rest + row * splits + split, tl.max(tl.maximum(best, others), axis=0))


@triton.jit
def _leaders(keys, key_ids, row, splits, VOCAB: tl.constexpr, SPLITS_BLOCK: tl.constexpr):
    """[LEADERS] keys and ids of the row's highest, in that order."""
    entry, place = tl.arange(0, SPLITS_BLOCK * LEADERS), tl.arange(0, LEADERS)
    at, real = row * splits * LEADERS + entry, entry < splits * LEADERS
    key = tl.load(keys + at, mask=real, other=float("-inf"))
    token = tl.load(key_ids + at, mask=real, other=VOCAB)
    leading, leading_id = nothing(LEADERS, VOCAB)
    for index in tl.static_range(LEADERS):
        best, best_id = best_of(key, token, VOCAB)
        leading = tl.where(place == index, best, leading)
        leading_id = tl.where(place == index, best_id, leading_id)
        key = tl.where(token == best_id, float("-inf"), key)
    return leading, leading_id


@triton.jit
def _weights_of(line, ids, highest, temperature, VOCAB: tl.constexpr):
    x = tl.load(line + ids, mask=ids < VOCAB, other=float("-inf"))
    return tl.exp(scaled(x, highest, temperature))


@triton.jit
def _weigh_kernel(
    logits, slots, floats, longs, highest, open_rows, keys, key_ids, above, pitch,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if (tl.load(open_rows + row) != 0) & ((tl.load(longs + slot * LONGS + WANTS) & NUCLEUS) != 0):
        top, temperature = tl.load(highest + row), tl.load(floats + slot * FLOATS + TEMPERATURE)
        line = logits + row * pitch
        _, ids = _leaders(keys, key_ids, row, SPLITS, VOCAB, SPLITS_BLOCK)
        least = _weights_of(line, ids, top, temperature, VOCAB)
        total = tl.zeros((LEADERS,), dtype=tl.int64)
        for start in range(split * BLOCK, VOCAB, SPLITS * BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(line + token, mask=token < VOCAB, other=float("-inf"))
            weight = tl.exp(scaled(x, top, temperature))
            more = weight[None, :] > least[:, None]
            total += tl.sum(tl.where(more, integer(weight)[None, :], 0), axis=1)
        tl.store(above + (row * SPLITS + split) * LEADERS + tl.arange(0, LEADERS), total)


@triton.jit
def _close_kernel(
    logits, slots, floats, longs, highest, open_rows, keys, key_ids, rest, above, masses, cutoffs, tokens,
    pitch, VOCAB: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    setting, value_of, line = longs + slot * LONGS, floats + slot * FLOATS, logits + row * pitch
    searched = tl.load(open_rows + row) != 0
    if searched:
        top, temperature = tl.load(highest + row), tl.load(value_of + TEMPERATURE)
        k, p, min_p = tl.load(setting + TOP_K), tl.load(value_of + TOP_P), tl.load(value_of + MIN_P)
        total = sum_of(masses, row, SPLITS, SPLITS_BLOCK)
        if (tl.load(setting + WANTS) & NUCLEUS) != 0:
            leading, ids = _leaders(keys, key_ids, row, SPLITS, VOCAB, SPLITS_BLOCK)
            split, place = tl.arange(0, SPLITS_BLOCK), tl.arange(0, LEADERS)
            at = (row * SPLITS + split[:, None]) * LEADERS + place[None, :]
            over = tl.sum(tl.load(above + at, mask=split[:, None] < SPLITS, other=0), axis=0)
            bound = tl.load(rest + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
            weight = _weights_of(line, ids, top, temperature, VOCAB)
            inside = (over < share_of(total, p)) & (weight >= tl.minimum(min_p, 1.0))
            inside &= leading > tl.max(bound, axis=0)
            first = tl.min(tl.where(inside, place, LEADERS), axis=0)
            if first < LEADERS:
                token = tl.sum(tl.where(place == first, ids, 0), axis=0)
                tl.store(tokens + row, token.to(tl.int64))
                searched = searched & False
        if searched:
            none = top * 0 - 1
            cutoff, _ = cutoff_of(line, VOCAB, top, temperature, k, p, total, none, VOCAB, BLOCK)
            draw_kept(
                line, key_ids, VOCAB, top, temperature, cutoff, setting, value_of, cutoffs + row,
                tokens + row, False, VOCAB, QUARTER, BLOCK,
            )  # fmt: skip


def close(
    logits: torch.Tensor,
    slots: torch.Tensor,
    table: SamplingTable,
    space: SamplingSpace,
    tokens: torch.Tensor,
    *,
    race: bool,
) -> None:
    """The tokens of the rows that decide() has left open. race: some may want NUCLEUS."""
    (count, vocab), s = logits.shape, space
    pitch, size, splits = logits.stride(0), block_of(vocab), {"SPLITS_BLOCK": block(space.splits)}
    splits["SPLITS"] = space.splits
    given = (logits, slots, table.floats, table.longs, s.highest, s.open_rows, s.keys, s.key_ids)
    if race:
        _race_kernel[(count, s.splits)](
            *given, s.rest, pitch, VOCAB=vocab, QUARTER=quarter_of(vocab), BLOCK=min(size, 512), num_warps=4
        )
        _weigh_kernel[(count, s.splits)](
            *given, s.above, pitch, VOCAB=vocab, BLOCK=min(size, 512), num_warps=4, **splits
        )
    _close_kernel[(count,)](
        *given, s.rest, s.above, s.masses, s.cutoff, tokens, pitch,
        VOCAB=vocab, QUARTER=quarter_of(vocab), BLOCK=min(size, 512), num_warps=16, **splits,
    )  # fmt: skip
