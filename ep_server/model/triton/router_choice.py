"""[7] The choice of experts from a tile of logits, for every family: what the router's kernels share.

The order of operations is that of model/router.py: score, + bias, limit to groups, top-k, gather,
renormalise, scale; all in float32. Equal choices go to the lower id, which torch.topk leaves open. A token
with NaN among its logits gets NaN weights, and distinct valid ids. Rows past the number of real tokens,
which is read on the device, get ids -1 and weights 0: the exchange sends nothing for them.

A tile is [tokens, lanes]: experts of a group lie side by side, groups and their number padded to powers of
two. Instead of by score, experts can be drawn at random: the draws are those of model/uniform.py, in the
order of that. T tokens, E experts, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ep_server.errors import InternalError
from ep_server.model.families.spec import GroupScore, RouterSpec, Score
from ep_server.model.triton.checks import block, expect, expect_range

MAX_EXPERTS = 4096
GOLDEN, LOW = tl.constexpr(0x9E3779B9), tl.constexpr(0xFFFFFFFF)
LOWEST = tl.constexpr(-(1 << 31))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Experts are drawn. seed, layer: of the draw.

    numbers, positions: [T] int32, of each row's request and in that.
    """

    numbers: torch.Tensor
    positions: torch.Tensor
    seed: int
    layer: int


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are chosen, and where the choice goes.

    ids: [T, K] int64, distinct per token, best choice first. weights: [T, K] float32.
    bias: [E] float32, with spec.bias only. num_tokens: [1] int32, rows that are tokens; None = all.
    drawn: experts are drawn instead; they get the weights that the router gives them.
    """

    spec: RouterSpec
    ids: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    drawn: Drawn | None = None

    def check(self, rows: int) -> None:
        """Raises InternalError for a shape, dtype or layout that does not fit so many rows."""
        spec = self.spec
        expect_range("num_experts", spec.num_experts, 1, MAX_EXPERTS)
        if (self.bias is not None) != spec.bias:
            raise InternalError(f"bias: must be {'given' if spec.bias else 'None'} for this router")
        if self.bias is not None:
            expect("bias", self.bias, torch.float32, (spec.num_experts,))
        expect("ids", self.ids, torch.int64, (rows, spec.top_k))
        expect("weights", self.weights, torch.float32, (rows, spec.top_k))
        if self.num_tokens is not None:
            expect("num_tokens", self.num_tokens, torch.int32, (1,))
        if self.drawn is not None:
            expect("numbers", self.drawn.numbers, torch.int32, (rows,))
            expect("positions", self.drawn.positions, torch.int32, (rows,))

    def arguments(self) -> dict[str, Any]:
        """Of a kernel that ends in choose()."""
        spec, drawn = self.spec, self.drawn
        return {
            "bias": self.bias,
            "num_tokens": self.num_tokens,
            "numbers": None if drawn is None else drawn.numbers,
            "positions": None if drawn is None else drawn.positions,
            "ids": self.ids,
            "weights": self.weights,
            "eps": spec.renorm_eps,
            "scale": spec.scale,
            "seed": 0 if drawn is None else drawn.seed,
            "layer": 0 if drawn is None else drawn.layer,
            "EXPERTS": spec.num_experts,
            "K": spec.top_k,
            "GROUPS": spec.groups,
            "TOP_GROUPS": spec.top_groups,
            "SIGMOID": spec.score is Score.SIGMOID,
            "TOP2": spec.group_score is GroupScore.TOP2_SUM,
            "RENORMALISE": spec.renormalise,
            "GROUP_BLOCK": block(spec.groups),
            "SIZE_BLOCK": block(spec.num_experts // spec.groups),
            "K_BLOCK": block(spec.top_k),
        }


@triton.jit
def lanes_of(
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr
):
    """The expert of each lane, and whether there is one: [lanes]."""
    size: tl.constexpr = EXPERTS // GROUPS
    lane = tl.arange(0, GROUP_BLOCK * SIZE_BLOCK)
    group, member = lane // SIZE_BLOCK, lane % SIZE_BLOCK
    return group * size + member, (group < GROUPS) & (member < size)


@triton.jit
def live_of(num_tokens, rows):
    """How many of the rows are tokens."""
    live = rows
    if num_tokens is not None:
        live = tl.minimum(tl.load(num_tokens), rows)
    return live


@triton.jit
def store_choice(ids, weights, token, rows, live, chosen, gates, K: tl.constexpr, K_BLOCK: tl.constexpr):
    """chosen, gates: [tokens, K_BLOCK]. Nothing is chosen for rows from `live` on."""
    slot = tl.arange(0, K_BLOCK)
    at = token.to(tl.int64)[:, None] * K + slot[None, :]
    mine, lives = (token < rows)[:, None] & (slot < K)[None, :], (token < live)[:, None]
    tl.store(ids + at, tl.where(lives, chosen.to(tl.int64), -1), mask=mine)
    tl.store(weights + at, tl.where(lives, gates, 0.0), mask=mine)


@triton.jit
def _scores(x, real, SIGMOID: tl.constexpr):
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        e = tl.where(real[None, :], tl.exp(x - tl.max(x, axis=1)[:, None]), 0.0)
        score = e / tl.sum(e, axis=1)[:, None]
    return score


@triton.jit
def _mixed(x):
    """uniform._mixed: x is int64 and below 2^32."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW
    return x ^ (x >> 16)


@triton.jit
def _drawn_keys(numbers, positions, token, live, expert, seed, layer):
    """What is drawn for each expert: distinct int32; the largest are chosen."""
    number = tl.load(numbers + token, mask=token < live, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=token < live, other=0).to(tl.int64)
    state = _mixed(_mixed(_mixed(number ^ seed) ^ GOLDEN) ^ position)
    state = _mixed(state ^ ((layer + 1).to(tl.int64) * GOLDEN & LOW))
    drawn = _mixed(state[:, None] ^ (expert.to(tl.int64) * GOLDEN & LOW)[None, :])
    return (drawn + LOWEST).to(tl.int32)


@triton.jit
def _ordered(choice):
    """int32 in the order of float32 that is not NaN: a warp finds the highest integer in one instruction."""
    bits = choice.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _best_groups(
    choice, TOKENS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether a lane's group stays: [tokens, lanes]."""
    choice = tl.reshape(choice, (TOKENS, GROUP_BLOCK, SIZE_BLOCK))
    group, member = tl.arange(0, GROUP_BLOCK)[None, :], tl.arange(0, SIZE_BLOCK)[None, None, :]
    value = tl.max(choice, axis=2)
    if TOP2:
        first = tl.min(tl.where(choice == value[:, :, None], member, SIZE_BLOCK), axis=2)
        value += tl.max(tl.where(member == first[:, :, None], float("-inf"), choice), axis=2)
    kept = tl.zeros((TOKENS, GROUP_BLOCK), dtype=tl.int32)
    for _ in range(TOP_GROUPS):
        open_ = (group < GROUPS) & (kept == 0)
        top = tl.max(tl.where(open_, value, float("-inf")), axis=1)
        index = tl.min(tl.where(open_ & (value == top[:, None]), group, GROUPS), axis=1)
        kept = tl.where(group == index[:, None], 1, kept)
    kept = tl.broadcast_to(kept[:, :, None], (TOKENS, GROUP_BLOCK, SIZE_BLOCK))
    return tl.reshape(kept, (TOKENS, GROUP_BLOCK * SIZE_BLOCK)) == 1


@triton.jit
def choose(
    x, bias, numbers, positions, token, live, eps, scale, seed, layer,
    EXPERTS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr, TOP2: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Chosen experts and their weights, [tokens, K_BLOCK].

    x: [tokens, lanes] logits, -inf where a lane has no expert. token: [tokens] rows, tokens up to `live`.
    """
    expert, real = lanes_of(EXPERTS, GROUPS, GROUP_BLOCK, SIZE_BLOCK)
    score = _scores(x, real, SIGMOID)
    open_ = tl.broadcast_to(real[None, :], score.shape)
    if numbers is not None:
        key = _drawn_keys(numbers, positions, token, live, expert, seed, layer)
    else:
        choice = score
        if bias is not None:
            choice += tl.load(bias + expert, mask=real, other=0.0)[None, :]
        choice = tl.where(open_ & (choice > float("-inf")), choice, float("-inf"))  # NaN too
        if GROUPS > 1:
            open_ &= _best_groups(choice, TOKENS, GROUPS, TOP_GROUPS, TOP2, GROUP_BLOCK, SIZE_BLOCK)
        key = _ordered(choice)
    lanes: tl.constexpr = GROUP_BLOCK * SIZE_BLOCK
    lane, slot = tl.arange(0, lanes)[None, :], tl.arange(0, K_BLOCK)[None, :]
    best = tl.zeros((TOKENS, K_BLOCK), dtype=tl.int32)
    for k in tl.static_range(K):
        top = tl.max(tl.where(open_, key, LOWEST), axis=1)
        index = tl.min(tl.where(open_ & (key == top[:, None]), lane, lanes), axis=1)
        best = tl.where(slot == k, index[:, None], best)
        open_ &= lane != index[:, None]
    gates = tl.where(slot < K, tl.gather(score, best, 1), 0.0)
    if RENORMALISE:
        gates /= (tl.sum(gates, axis=1) + eps)[:, None]
    size: tl.constexpr = EXPERTS // GROUPS
    return best // SIZE_BLOCK * size + best % SIZE_BLOCK, gates * scale
