"""The arithmetic of a draw, one definition for all kernels: relative weights, the filters' cutoff, the noise.

    z       (logit - highest) / temperature, <= 0          weight = exp(z), in [0, 1]; the likeliest has 1
    kept    weight >= cutoff; equal weights are kept or removed together
    noise   an exponential variate per (seed, position, token id), from the counter-based Philox 4 x 32

The token with the highest z - log(noise) among the kept is a draw from their normalised weights. Which token
that is depends on the row's own logits, seed and position: not on the batch, nor on how a row is cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ep_server.model.triton.checks import block

FANOUT = tl.constexpr(16)  # cutoffs tried in one pass: 4 bits of the answer


@triton.jit
def scaled(logits, highest, temperature):
    """z of each logit. highest: finite, the row's maximum. temperature: > 0."""
    # One that underflows would make 0 / 0 of the likeliest token, an infinite one inf / inf of a banned one.
    return (logits.to(tl.float32) - highest) / tl.clamp(temperature, 1e-30, 1e30)


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
def total_weight(logits, highest, temperature, floor, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of a row's weights that are at least `floor`."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < VOCAB, other=float("-inf"))
        weight = tl.exp(scaled(x, highest, temperature))
        total += tl.where(weight >= floor, weight, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def least_cutoff(
    logits, highest, temperature, floor, limit, COUNT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """The least value v in [0, 1] such that the weights above it come to less than `limit`.

    Weights below `floor` do not count. COUNT: each counts 1, else as much as it is. Non-negative floats order
    as their bit patterns, so this searches a pattern, 4 bits in a pass over the row: exact, without a sort.
    """
    step = tl.arange(0, FANOUT)
    prefix = tl.full((), 0, dtype=tl.int32)  # the highest pattern known to leave too much above it
    none = tl.full((), 0, dtype=tl.int32)
    for level in range(8):
        shift = 28 - 4 * level
        tried = prefix + (step << shift)
        value = tried.to(tl.float32, bitcast=True)
        above = tl.zeros((FANOUT,), dtype=tl.float32)
        for start in range(0, VOCAB, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits + token, mask=token < VOCAB, other=float("-inf"))
            weight = tl.exp(scaled(x, highest, temperature))
            worth = tl.where(weight >= floor, 1.0 if COUNT else weight, 0.0)
            above += tl.sum(tl.where(weight[None, :] > value[:, None], worth[None, :], 0.0), axis=1)
        much = (above >= limit) & ((level > 0) | (step < 4))  # patterns of [0, 1] have 30 bits
        found = tl.sum(much.to(tl.int32), axis=0)
        none = tl.where((level == 0) & (found == 0), 1, none)
        prefix += tl.maximum(found - 1, 0) << shift
    cutoff = (prefix + 1).to(tl.float32, bitcast=True)
    return tl.where(none == 1, 0.0, tl.minimum(cutoff, 1.0))


def quarter_of(vocab: int) -> int:
    """Token ids that share a Philox counter are this far apart; a function of the vocabulary alone."""
    return -(-vocab // 4)


def block_of(vocab: int) -> int:
    """Token ids of a tile."""
    return min(block(quarter_of(vocab)), 1024)
