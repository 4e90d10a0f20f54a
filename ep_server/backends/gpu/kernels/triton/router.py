"""[7] From router logits to expert ids and weights in one kernel, for every family.

The order of operations is that of models/moe.py, all in float32: score, + bias, limit to groups, top-k,
gather, renormalise, scale. Equal choices go to the lower id, which torch.topk leaves open. A token with NaN
among its logits gets NaN weights and distinct valid ids. Rows past the number of real tokens, which the
kernel reads on the device, get ids -1 and weights 0: the exchange sends nothing for them.

One program per token. Its lanes hold the experts of a group side by side; groups and their number are padded
to powers of two. Instead of by score, experts can be drawn at random, exactly as UniformRouting draws them.
T tokens, E experts, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import after_previous, block, early, expect, expect_range
from ep_server.backends.gpu.kernels.triton.partial import Partial, load_sum, operand
from ep_server.errors import InternalError
from ep_server.models import moe
from ep_server.models.families.spec import GroupScore, RouterSpec, Score

MAX_EXPERTS = 4096
GOLDEN, LOWEST = tl.constexpr(0x9E3779B9), tl.constexpr(-(1 << 31))
ZIPF_STEP = tl.constexpr(moe.ZIPF_STEP)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Experts drawn at random. seed, layer, exponent: of the draw, see UniformRouting.

    numbers, positions: [T] int32, number of each row's request and position in that request.
    """

    numbers: torch.Tensor
    positions: torch.Tensor
    seed: int
    layer: int
    exponent: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are chosen, and where the choice is written.

    ids: [T, K] int64, distinct per token, best choice first. weights: [T, K] float32.
    bias: [E] float32, with spec.bias only. num_tokens: [1] int32, rows that are tokens; None = all.
    drawn: draw experts at random instead; they get the router's weights.
    slots: [W, E] int32; ids are then slots[t % W, e] instead of e. No kernel writes it.
    """

    spec: RouterSpec
    ids: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    drawn: Drawn | None = None
    slots: torch.Tensor | None = None

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
        if self.slots is not None:
            expect("slots", self.slots, torch.int32, (None, spec.num_experts))
        if self.drawn is not None:
            expect("numbers", self.drawn.numbers, torch.int32, (rows,))
            expect("positions", self.drawn.positions, torch.int32, (rows,))


@triton.jit
def _scores(x, real, SIGMOID: tl.constexpr):
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        e = tl.where(real, tl.exp(x - tl.max(x, axis=0)), 0.0)
        score = e / tl.sum(e, axis=0)
    return score


@triton.jit
def _mixed(x):
    """uniform._mixed of uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _drawn_keys(numbers, positions, token, expert, seed, layer):
    """A random number for each expert: distinct int32; the largest are chosen."""
    number = tl.load(numbers + token).to(tl.uint32)
    position = tl.load(positions + token).to(tl.uint32)
    state = _mixed(_mixed(_mixed(number ^ seed.to(tl.uint32)) ^ GOLDEN) ^ position)
    state = _mixed(state ^ (layer + 1).to(tl.uint32) * GOLDEN)
    drawn = _mixed(state ^ expert.to(tl.uint32) * GOLDEN)
    return drawn.to(tl.int32, bitcast=True) ^ LOWEST


@triton.jit
def _zipf_keys(keys, place, exponent):
    """Of _drawn_keys() at random: float32, of which the largest are chosen. place: [lanes] int32, from 0."""
    bits = (keys ^ LOWEST).to(tl.uint32, bitcast=True) >> 9
    gumbel = -tl.log(-tl.log((bits.to(tl.float32) + 0.5) * (1.0 / (1 << 23))))
    return gumbel - exponent * tl.log((place + 1).to(tl.float32))


@triton.jit
def _ordered(choice):
    """int32 in the order of float32, except NaN. A warp finds the highest integer in one instruction."""
    bits = choice.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _best_groups(
    choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether a lane's group stays: [lanes]."""
    choice = tl.reshape(choice, (GROUP_BLOCK, SIZE_BLOCK))
    group, member = tl.arange(0, GROUP_BLOCK), tl.arange(0, SIZE_BLOCK)[None, :]
    value = tl.max(choice, axis=1)
    if TOP2:
        first = tl.min(tl.where(choice == value[:, None], member, SIZE_BLOCK), axis=1)
        value += tl.max(tl.where(member == first[:, None], float("-inf"), choice), axis=1)
    kept = tl.zeros((GROUP_BLOCK,), dtype=tl.int32)
    for _ in range(TOP_GROUPS):
        open_ = (group < GROUPS) & (kept == 0)
        top = tl.max(tl.where(open_, value, float("-inf")), axis=0)
        index = tl.min(tl.where(open_ & (value == top), group, GROUPS), axis=0)
        kept = tl.where(group == index, 1, kept)
    kept = tl.broadcast_to(kept[:, None], (GROUP_BLOCK, SIZE_BLOCK))
    return tl.reshape(kept, (GROUP_BLOCK * SIZE_BLOCK,)) == 1


@triton.jit(do_not_specialize=["layer", "seed", "exponent"])
def _route_kernel(
    logits, bias, num_tokens, numbers, positions, slots, ids, weights, pitch, part, eps, scale,
    seed, layer, exponent,
    EXPERTS: tl.constexpr, WAYS: tl.constexpr, K: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, TOP2: tl.constexpr,
    RENORMALISE: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    PARTS: tl.constexpr, ZIPF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = EXPERTS // GROUPS
    lanes: tl.constexpr = GROUP_BLOCK * SIZE_BLOCK
    lane = tl.arange(0, lanes)
    expert = lane // SIZE_BLOCK * size + lane % SIZE_BLOCK
    real = (lane // SIZE_BLOCK < GROUPS) & (lane % SIZE_BLOCK < size)
    place = expert
    if slots is not None:  # of every expert, while the previous kernel still runs: nobody waits for it then
        # One load of a lane: several take the registers and scoreboards of the logits, which then wait.
        place = tl.load(slots + tl.program_id(0) % WAYS * EXPERTS + expert, mask=real, other=0)
    after_previous(EARLY)
    live = True
    if num_tokens is not None:  # no branch, so that the loads below overlap this one
        live = token < tl.load(num_tokens)
    x = tl.where(
        real, load_sum(logits + token * pitch + expert, real, part, PARTS, tl.float32), float("-inf")
    )
    score = _scores(x, real, SIGMOID)
    open_ = real
    if numbers is not None:
        key = _drawn_keys(numbers, positions, token, expert, seed, layer)
        if ZIPF:
            key = _ordered(_zipf_keys(key, (expert + layer * ZIPF_STEP) % EXPERTS, exponent))
    else:
        choice = score
        if bias is not None:
            choice += tl.load(bias + expert, mask=real, other=0.0)
        choice = tl.where(real & (choice > float("-inf")), choice, float("-inf"))  # NaN too
        if GROUPS > 1:
            open_ &= _best_groups(choice, GROUPS, TOP_GROUPS, TOP2, GROUP_BLOCK, SIZE_BLOCK)
        key = _ordered(choice)
    slot = tl.arange(0, K_BLOCK)
    best = tl.zeros((K_BLOCK,), dtype=tl.int32)
    for k in tl.static_range(K):
        top = tl.max(tl.where(open_, key, LOWEST), axis=0)
        index = tl.min(tl.where(open_ & (key == top), lane, lanes), axis=0)
        best = tl.where(slot == k, index, best)
        open_ &= lane != index
    gates = tl.where(slot < K, tl.gather(score, best, 0), 0.0)
    if RENORMALISE:
        gates /= tl.sum(gates, axis=0) + eps
    chosen = tl.gather(place, best, 0) if slots is not None else best // SIZE_BLOCK * size + best % SIZE_BLOCK
    tl.store(ids + token * K + slot, tl.where(live, chosen, -1).to(tl.int64), mask=slot < K)
    tl.store(weights + token * K + slot, tl.where(live, gates * scale, 0.0), mask=slot < K)


def route(logits: torch.Tensor | Partial, choice: Choice) -> None:
    """Chooses experts.

    Args:
        logits: [T, E] float32, rows may have a pitch; or their partial sums.
    Raises: InternalError for another shape, dtype or layout.
    """
    spec, drawn, experts = choice.spec, choice.drawn, choice.spec.num_experts
    given = operand("logits", logits, torch.float32, (None, experts))
    tokens = len(given.rows)
    choice.check(tokens)
    draw: tuple[torch.Tensor | float | None, ...] = (None, None, 0, 0, 0.0)
    if drawn is not None:
        draw = (drawn.numbers, drawn.positions, drawn.seed, drawn.layer, drawn.exponent)
    if tokens:
        _route_kernel[(tokens,)](
            given.rows, choice.bias, choice.num_tokens, *draw[:2], choice.slots, choice.ids, choice.weights,
            given.rows.stride(0), given.step, spec.renorm_eps, spec.scale, *draw[2:],
            EXPERTS=experts, WAYS=1 if choice.slots is None else len(choice.slots), K=spec.top_k,
            GROUPS=spec.groups, TOP_GROUPS=spec.top_groups,
            SIGMOID=spec.score is Score.SIGMOID, TOP2=spec.group_score is GroupScore.TOP2_SUM,
            RENORMALISE=spec.renormalise, GROUP_BLOCK=block(spec.groups),
            SIZE_BLOCK=block(experts // spec.groups), K_BLOCK=block(spec.top_k), PARTS=given.parts,
            ZIPF=bool(draw[4]),
            **early(choice.ids, lets_next_start=True), num_warps=1 if experts <= 256 else 4,
        )  # fmt: skip
