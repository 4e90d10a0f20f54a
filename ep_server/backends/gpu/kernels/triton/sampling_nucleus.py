"""The last kernels of a draw: rows whose filters keep more than the candidates of sampling_filters.py.

A token of top-p is the one of the highest key in the nucleus. The highest keys of the whole row come first:
one of them is in the nucleus as soon as the weights above its own come to less than the nucleus. So of a wide
nucleus no cutoff is needed, and race and weigh take one pass each, by all
programs of a row:

    race     (row, split)  the highest keys of a part, and a bound on all its others
    weigh    (row, split)  the weights above those of the row's LEADERS highest keys
    close    row           the first leader in the nucleus; if none is, and for top-k, a search by one program

With top-p of 0.9 none of 8 leaders is in the nucleus once in 10^8 draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.checks import block
from ep_server.backends.gpu.kernels.triton.sampling_filters import cutoff_of, draw_kept
from ep_server.backends.gpu.kernels.triton.sampling_space import LEADERS, SamplingSpace
from ep_server.backends.gpu.kernels.triton.sampling_table import (
    DRAWN,
    FLOATS,
    LONGS,
    MIN_P,
    NUCLEUS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WANTS,
    SamplingTable,
)
from ep_server.backends.gpu.kernels.triton.sampling_weights import (
    best_of,
    block_of,
    integer,
    keep_better,
    keys_of,
    noise,
    nothing,
    quarter_of,
    scaled,
    share_of,
    sum_of,
)


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
    """The tokens of the rows that settle() has left open. race: some may want NUCLEUS."""
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
