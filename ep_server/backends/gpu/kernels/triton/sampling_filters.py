"""The arithmetic of a draw, shared by all sampling kernels: relative weights, filters, noise.

    z       (logit - highest) / temperature, <= 0          weight = exp(z), in [0, 1]; the likeliest has 1
    kept    weight >= cutoff; equal weights are kept or removed together
    noise   an exponential variate per (seed, position, token id), from the counter-based Philox 4 x 32

The draw is the kept token with the highest z - log(noise), which is a draw from the normalised weights. It
depends on the row's own logits, seed and position only. The batch does not matter, nor how a row is split:
sums of weights are integers (of 2^-40), which are the same in any order.

The functions below take `values`, `ids`, `length`: logits and their token ids in memory or, without LISTED,
a whole row, where the place is the id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import block
from ep_server.backends.gpu.kernels.triton.sampling_table import (
    DRAWN,
    DRAWS,
    FILTERS,
    FLOATS,
    LONGS,
    LOWEST,
    MIN_P,
    REPORTS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WANTS,
    SamplingSpace,
    SamplingTable,
    block_of,
    quarter_of,
)

FANOUT = tl.constexpr(16)  # cutoffs tried in one pass: 4 bits of the answer
ONE = tl.constexpr(1099511627776.0)  # weight 1 as an integer: 2^40


@triton.jit
def scaled(logits, highest, temperature):
    """z of each logit. highest: finite, the row's maximum. temperature: > 0."""
    # One that underflows would make 0 / 0 of the likeliest token, an infinite one inf / inf of a banned one.
    return (logits.to(tl.float32) - highest) / tl.clamp(temperature, 1e-30, 1e30)


@triton.jit
def integer(weights):
    """Weights in [0, 1] as int64."""
    return (weights * ONE).to(tl.int64)


@triton.jit
def nothing(BLOCK: tl.constexpr, VOCAB: tl.constexpr):
    """Lanes of keep_better() that have seen no value yet."""
    return tl.full((BLOCK,), float("-inf"), dtype=tl.float32), tl.full((BLOCK,), VOCAB, dtype=tl.int32)


@triton.jit
def keep_better(best, best_id, value, token):
    """Lane by lane the higher value; of equal ones the lower id."""
    better = (value > best) | ((value == best) & (token < best_id))
    return tl.where(better, value, best), tl.where(better, token, best_id)


@triton.jit
def best_of(value, token, VOCAB: tl.constexpr):
    """The highest value of a vector and the lowest id that has it."""
    highest = tl.max(value, axis=0)
    return highest, tl.min(tl.where(value == highest, token, VOCAB), axis=0)


@triton.jit
def joined(values, ids, row, splits, VOCAB: tl.constexpr, SPLITS_BLOCK: tl.constexpr):
    """The best of what a row's splits have left."""
    split = tl.arange(0, SPLITS_BLOCK)
    value = tl.load(values + row * splits + split, mask=split < splits, other=float("-inf"))
    return best_of(value, tl.load(ids + row * splits + split, mask=split < splits, other=VOCAB), VOCAB)


@triton.jit
def sum_of(parts, row, splits, SPLITS_BLOCK: tl.constexpr):
    """The sum of what a row's splits have left."""
    split = tl.arange(0, SPLITS_BLOCK)
    return tl.sum(tl.load(parts + row * splits + split, mask=split < splits, other=0), axis=0)


@triton.jit
def noise(seed, position, quad, quarter: tl.constexpr):
    """Exponential variates of four token ids: quad, quad + quarter, quad + 2 quarter, quad + 3 quarter.

    seed: int64. position: int64, tokens drawn so far. quad: int32 [n], below quarter.
    """
    low = quad * 0 + position.to(tl.int32)
    high = quad * 0 + (position >> 32).to(tl.int32)
    a, b, c, d = tl.philox(seed, quad, low, high, quad * 0)
    return _exponential(a), _exponential(b), _exponential(c), _exponential(d)


@triton.jit
def _exponential(bits):
    """-log(1 - u) for u = (bits + 1/2) / 2^32, small values to full precision: they decide who wins."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = u * (1.0 + u * (0.5 + u * (0.33333333 + u * 0.25)))
    return tl.where(u < 0.015625, series, -tl.log(1.0 - u))


@triton.jit
def keys_of(
    line, quad, variate, highest, temperature, cutoff,
    PART: tl.constexpr, VOCAB: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    """Keys and ids of one of the four tokens of each quad; -inf where there is no such token.

    line: a row of logits. variate: PART of noise(). cutoff: tokens of less weight have -inf too; None = none.
    """
    token = quad + PART * QUARTER
    real = (quad < QUARTER) & (token < VOCAB)
    z = scaled(tl.load(line + token, mask=real, other=float("-inf")), highest, temperature)
    if cutoff is not None:
        real &= tl.exp(z) >= cutoff
    return tl.where(real, z - tl.log(variate), float("-inf")), token


@triton.jit
def _loaded(values, start, length, BLOCK: tl.constexpr):
    """A tile of logits; -inf beyond the last one."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(values + at, mask=at < length, other=float("-inf")).to(tl.float32)


@triton.jit
def total_weight(values, length, highest, temperature, floor, BLOCK: tl.constexpr):
    """Integer sum of the weights that are at least `floor`."""
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, length, BLOCK):
        weight = tl.exp(scaled(_loaded(values, start, length, BLOCK), highest, temperature))
        total += tl.where(weight >= floor, integer(weight), 0)
    return tl.sum(total, axis=0)


@triton.jit
def least_cutoff(
    values, length, highest, temperature, floor, limit, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The least value v in [0, 1] such that the weights above it come to less than `limit`, int64.

    Weights below `floor` do not count. COUNT: each counts 1, else as much as it is. Non-negative floats order
    as their bit patterns, so this searches a pattern, 4 bits in a pass: exact, without a sort.
    """
    step = tl.arange(0, FANOUT)
    prefix = tl.full((), 0, dtype=tl.int32)  # the highest pattern known to leave too much above it
    none = tl.full((), 0, dtype=tl.int32)
    for level in range(8):
        shift = 28 - 4 * level
        tried = (prefix + (step << shift)).to(tl.float32, bitcast=True)
        above = tl.zeros((FANOUT,), dtype=tl.int64)
        for start in range(0, length, BLOCK):
            weight = tl.exp(scaled(_loaded(values, start, length, BLOCK), highest, temperature))
            worth = tl.where(weight >= floor, 1 if COUNT else integer(weight), 0).to(tl.int64)[None, :]
            # A product, not a choice: over bfloat16 logits Triton 3.7 does not compile the latter.
            above += tl.sum((weight[None, :] > tried[:, None]).to(tl.int64) * worth, axis=1)
        much = (above >= limit) & ((level > 0) | (step < 4))  # patterns of [0, 1] have 30 bits
        found = tl.sum(much.to(tl.int32), axis=0)
        none = tl.where((level == 0) & (found == 0), 1, none)
        prefix += tl.maximum(found - 1, 0) << shift
    cutoff = (prefix + 1).to(tl.float32, bitcast=True)
    return tl.where(none == 1, 0.0, tl.minimum(cutoff, 1.0))


@triton.jit
def share_of(total, share):
    """The least integer that is not below `share` of an integer sum."""
    exact = total.to(tl.float64) * share.to(tl.float64)
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def drawn_of(
    values, ids, length, highest, temperature, cutoff, seed, position,
    LISTED: tl.constexpr, VOCAB: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The id of the highest key among the weights that are at least `cutoff`."""
    best, best_id = nothing(BLOCK, VOCAB)
    for start in range(0, length, BLOCK):
        token = start + tl.arange(0, BLOCK)
        real = token < length
        if LISTED:
            token = tl.load(ids + token, mask=real, other=0)
        z = scaled(_loaded(values, start, length, BLOCK), highest, temperature)
        a, b, c, d = noise(seed, position, token % QUARTER, QUARTER)
        part = token // QUARTER
        variate = tl.where(part == 0, a, tl.where(part == 1, b, tl.where(part == 2, c, d)))
        key = tl.where(real & (tl.exp(z) >= cutoff), z - tl.log(variate), float("-inf"))
        best, best_id = keep_better(best, best_id, key, tl.where(real, token, VOCAB))
    return best_of(best, best_id, VOCAB)[1]


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
    values, ids, length, highest, temperature, cutoff, setting, value_of, cutoff_out, token,
    LISTED: tl.constexpr, VOCAB: tl.constexpr, QUARTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws among what top-k, top-p and min-p leave. cutoff: of cutoff_of().

    setting, value_of: the row's settings. cutoff_out, token: where the cutoff of all three and the token go.
    """
    min_p, seed, position = tl.load(value_of + MIN_P), tl.load(setting + SEED), tl.load(setting + DRAWN)
    cutoff = tl.minimum(tl.maximum(cutoff, min_p), 1.0)  # the likeliest always stays
    tl.store(cutoff_out, cutoff)
    drawn = drawn_of(
        values, ids, length, highest, temperature, cutoff, seed, position, LISTED, VOCAB, QUARTER, BLOCK
    )
    tl.store(token, drawn.to(tl.int64))


@triton.jit(do_not_specialize=["splits"])
def _decide_kernel(
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


def decide(
    vocab: int, slots: torch.Tensor, table: SamplingTable, space: SamplingSpace, tokens: torch.Tensor
) -> None:
    """The tokens of random rows; where candidates are not enough, the row is left open."""
    s = space
    _decide_kernel[(len(tokens),)](
        slots, table.floats, table.longs, s.values, s.ids, s.highest, s.threshold, s.counts, s.listed,
        s.listed_ids, s.masses, s.open_rows, s.cutoff, tokens, s.splits,
        VOCAB=vocab, QUARTER=quarter_of(vocab), MOST=s.most, BLOCK=min(block_of(vocab), 512),
        SPLITS_BLOCK=block(s.splits), num_warps=8,
    )  # fmt: skip
