"""The arithmetic of a draw, one definition for all kernels: relative weights, the filters' cutoff, the noise.

    z       (logit - highest) / temperature, <= 0          weight = exp(z), in [0, 1]; the likeliest has 1
    kept    weight >= cutoff; equal weights are kept or removed together
    noise   an exponential variate per (seed, position, token id), from the counter-based Philox 4 x 32

The token with the highest z - log(noise) among the kept is a draw from their normalised weights. Which token
that is depends on the row's own logits, seed and position: not on the batch, nor on how a row is cut: sums of
weights are integers (of 2^-40), which come out the same in any order.

Functions below take `values`, `ids`, `length`: logits and their token ids in memory, or, without LISTED, a
whole row, whose ids are its places.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.checks import block

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


def quarter_of(vocab: int) -> int:
    """Token ids that share a Philox counter are this far apart; a function of the vocabulary alone."""
    return -(-vocab // 4)


def block_of(vocab: int) -> int:
    """Token ids of a tile."""
    return min(block(quarter_of(vocab)), 1024)
