"""From router logits to expert ids and weights in one kernel, for every family. T tokens, E experts.

The order of operations is that of model/router.py: score, + bias, limit to groups, top-k, gather,
renormalise, scale; all in float32. Equal choices go to the lower id, which torch.topk leaves open. A token
with NaN among its logits gets NaN weights, and distinct valid ids. Rows past the number of real tokens,
which is read on the device, get ids -1 and weights 0: the exchange sends nothing for them.

One program per token; its experts are one [groups, experts of a group] tile. Instead of by score, experts can
be drawn at random: the draws are those of model/uniform.py, in the order of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.errors import InternalError
from ep_server.model.families.spec import GroupScore, RouterSpec, Score
from ep_server.model.triton.checks import block, expect, expect_range
from ep_server.model.triton.early import after_previous, early

MAX_EXPERTS = 4096
GOLDEN, LOW = tl.constexpr(0x9E3779B9), tl.constexpr(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Experts are drawn. seed, layer: of the draw.

    numbers, positions: [T] int32, of each row's request and in that.
    """

    numbers: torch.Tensor
    positions: torch.Tensor
    seed: int
    layer: int


@triton.jit
def _scores(x, real, SIGMOID: tl.constexpr):
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        e = tl.where(real, tl.exp(x - tl.max(tl.max(x, axis=1), axis=0)), 0.0)
        score = e / tl.sum(tl.sum(e, axis=1), axis=0)
    return score


@triton.jit
def _mixed(x):
    """uniform._mixed: x is int64 and below 2^32."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW
    return x ^ (x >> 16)


@triton.jit
def _keys(numbers, positions, token, expert, seed, layer):
    """What is drawn for each expert: distinct, below 2^32; the largest are chosen."""
    number = tl.load(numbers + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    state = _mixed(_mixed(_mixed(number ^ seed) ^ GOLDEN) ^ position)
    state = _mixed(state ^ ((layer + 1).to(tl.int64) * GOLDEN & LOW))
    return _mixed(state ^ (expert.to(tl.int64) * GOLDEN & LOW))


@triton.jit
def _best_groups(
    choice,
    group,
    member,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    SIZE: tl.constexpr,
):
    """1 for each group that stays, [groups]."""
    value = tl.max(choice, axis=1)
    if TOP2:
        first = tl.min(tl.where(choice == value[:, None], member[None, :], SIZE), axis=1)
        value += tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), choice), axis=1)
    kept = tl.zeros(group.shape, dtype=tl.int32)
    for _ in range(TOP_GROUPS):
        open_ = (group < GROUPS) & (kept == 0)
        top = tl.max(tl.where(open_, value, float("-inf")), axis=0)
        index = tl.min(tl.where(open_ & (value == top), group, GROUPS), axis=0)
        kept = tl.where(group == index, 1, kept)
    return kept


@triton.jit(do_not_specialize=["layer", "seed"])
def _route_kernel(
    logits, bias, num_tokens, numbers, positions, ids, weights, pitch, eps, scale, seed, layer,
    EXPERTS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr, TOP2: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, K_BLOCK)
    at = token * K + lane
    if num_tokens is not None and token >= tl.load(num_tokens):
        tl.store(ids + at, tl.full((K_BLOCK,), -1, dtype=tl.int64), mask=lane < K)
        tl.store(weights + at, tl.zeros((K_BLOCK,), dtype=tl.float32), mask=lane < K)
        return
    size: tl.constexpr = EXPERTS // GROUPS
    group, member = tl.arange(0, GROUP_BLOCK), tl.arange(0, SIZE_BLOCK)
    expert = group[:, None] * size + member[None, :]
    real = (group < GROUPS)[:, None] & (member < size)[None, :]
    x = tl.load(logits + token * pitch + expert, mask=real, other=float("-inf"))
    score = _scores(x, real, SIGMOID)
    choice = score
    if bias is not None:
        choice += tl.load(bias + expert, mask=real, other=0.0)
    choice = tl.where(real & (choice > float("-inf")), choice, float("-inf"))  # NaN too
    open_, lowest = real, float("-inf")
    if numbers is not None:
        choice, lowest = _keys(numbers, positions, token, expert, seed, layer), -1
    elif GROUPS > 1:
        kept = _best_groups(choice, group, member, GROUPS, TOP_GROUPS, TOP2, size)
        open_ = real & (kept[:, None] == 1)
    chosen = tl.zeros((K_BLOCK,), dtype=tl.int64)
    gates = tl.zeros((K_BLOCK,), dtype=tl.float32)
    for k in range(K):
        top = tl.max(tl.max(tl.where(open_, choice, lowest), axis=1), axis=0)
        candidate = tl.where(open_ & (choice == top), expert, EXPERTS)
        index = tl.min(tl.min(candidate, axis=1), axis=0)
        gate = tl.sum(tl.sum(tl.where(real & (expert == index), score, 0.0), axis=1), axis=0)
        chosen = tl.where(lane == k, index.to(tl.int64), chosen)
        gates = tl.where(lane == k, gate, gates)
        open_ = open_ & (expert != index)
    if RENORMALISE:
        gates /= tl.sum(gates, axis=0) + eps
    tl.store(ids + at, chosen, mask=lane < K)
    tl.store(weights + at, gates * scale, mask=lane < K)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    spec: RouterSpec,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
    drawn: Drawn | None = None,
) -> None:
    """Chooses experts.

    Args:
        logits: [T, E] float32, rows may have a pitch. bias: [E] float32, with spec.bias only.
        ids: [T, K] int64, distinct per token, best choice first. weights: [T, K] float32.
        num_tokens: [1] int32, how many of the T rows are tokens; None = all.
        drawn: experts are drawn instead; they get the weights that the router gives them.
    Raises: InternalError for another shape, dtype or layout.
    """
    experts, k = spec.num_experts, spec.top_k
    expect_range("num_experts", experts, 1, MAX_EXPERTS)
    expect("logits", logits, torch.float32, (None, experts), pitch=True)
    if (bias is not None) != spec.bias:
        raise InternalError(f"bias: must be {'given' if spec.bias else 'None'} for this router")
    if bias is not None:
        expect("bias", bias, torch.float32, (experts,))
    expect("ids", ids, torch.int64, (len(logits), k))
    expect("weights", weights, torch.float32, (len(logits), k))
    if num_tokens is not None:
        expect("num_tokens", num_tokens, torch.int32, (1,))
    given: tuple[torch.Tensor | int | None, ...] = (None, None, 0, 0)
    if drawn is not None:
        given = (drawn.numbers, drawn.positions, drawn.seed, drawn.layer)
        expect("numbers", drawn.numbers, torch.int32, (len(logits),))
        expect("positions", drawn.positions, torch.int32, (len(logits),))
    size = experts // spec.groups
    if len(logits):
        _route_kernel[(len(logits),)](
            logits, bias, num_tokens, *given[:2], ids, weights,
            logits.stride(0), spec.renorm_eps, spec.scale, *given[2:],
            EXPERTS=experts, K=k, GROUPS=spec.groups, TOP_GROUPS=spec.top_groups,
            SIGMOID=spec.score is Score.SIGMOID, TOP2=spec.group_score is GroupScore.TOP2_SUM,
            RENORMALISE=spec.renormalise,
            GROUP_BLOCK=block(spec.groups), SIZE_BLOCK=block(size), K_BLOCK=block(k),
            **early(logits), num_warps=1 if experts <= 256 else 4,
        )  # fmt: skip
