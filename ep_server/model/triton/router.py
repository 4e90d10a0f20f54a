"""[7] From router logits to expert ids and weights: the choice of router_choice, one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.model.triton.checks import expect
from ep_server.model.triton.early import after_previous, early
from ep_server.model.triton.router_choice import Choice, choose, lanes_of, live_of, store_choice


@triton.jit(do_not_specialize=["layer", "seed", "rows"])
def _route_kernel(
    logits, bias, num_tokens, numbers, positions, ids, weights, rows, pitch, eps, scale, seed, layer,
    EXPERTS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr, TOP2: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    token = tl.program_id(0) + tl.arange(0, 1)
    live = live_of(num_tokens, rows)
    if tl.program_id(0) >= live:
        nothing = tl.zeros((1, K_BLOCK), dtype=tl.float32)
        store_choice(ids, weights, token, rows, live, nothing, nothing, K, K_BLOCK)
        return
    expert, real = lanes_of(EXPERTS, GROUPS, GROUP_BLOCK, SIZE_BLOCK)
    at = token.to(tl.int64)[:, None] * pitch + expert[None, :]
    x = tl.load(logits + at, mask=real[None, :], other=float("-inf"))
    chosen, gates = choose(
        x, bias, numbers, positions, token, live, eps, scale, seed, layer,
        EXPERTS, K, GROUPS, TOP_GROUPS, SIGMOID, TOP2, RENORMALISE, GROUP_BLOCK, SIZE_BLOCK, K_BLOCK, 1,
    )  # fmt: skip
    store_choice(ids, weights, token, rows, live, chosen, gates, K, K_BLOCK)


def route(logits: torch.Tensor, choice: Choice) -> None:
    """Chooses experts.

    Args:
        logits: [T, E] float32, rows may have a pitch.
    Raises: InternalError for another shape, dtype or layout.
    """
    rows, experts = len(logits), choice.spec.num_experts
    choice.check(rows)
    expect("logits", logits, torch.float32, (None, experts), pitch=True)
    if rows:
        _route_kernel[(rows,)](
            logits=logits, rows=rows, pitch=logits.stride(0), **choice.arguments(), **early(logits),
            num_warps=1 if experts <= 256 else 4,
        )  # fmt: skip
