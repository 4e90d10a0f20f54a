"""Between the projections and latent attention: norm, rotary embedding, the write into the cache.

store_mla(): RMS norm of the latent and the one rotary key, to the cache; the queries' rotary channels. What
rope.py says of pairs, rounding and slots holds here too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.checks import FLOATS, block, expect
from ep_server.backends.gpu.kernels.triton.early import after_previous, early
from ep_server.backends.gpu.kernels.triton.paged import PagedKv, to_code
from ep_server.backends.gpu.kernels.triton.rope import BLOCK_HEADS, Rotation, load_turn, store_cache
from ep_server.errors import InternalError


@triton.jit
def _store_mla_kernel(
    latent, k_rope, q_rope, q_out, cache, weight, table, positions, slots, k_scale,
    latent_pitch, rope_pitch, q_pitch, q_head_pitch, out_pitch, out_head_pitch, eps,
    Q_HEADS: tl.constexpr, LATENT: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_LATENT: tl.constexpr, FP8: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    pair = tl.arange(0, BLOCK)
    cos, sin = load_turn(table, tl.load(positions + token), pair, DIM // 2)
    group = tl.program_id(1)
    if group > 0:
        head = (group - 1) * HEADS + tl.arange(0, HEADS)
        inside = (head < Q_HEADS)[:, None] & (pair < DIM // 2)[None, :]
        at = q_rope + token * q_pitch + head[:, None] * q_head_pitch + pair[None, :] * STEP
        a = tl.load(at, mask=inside, other=0).to(tl.float32)
        b = tl.load(at + GAP, mask=inside, other=0).to(tl.float32)
        out = q_out + token * out_pitch + head[:, None] * out_head_pitch + pair[None, :] * STEP
        tl.store(out, (a * cos - b * sin).to(q_out.dtype.element_ty), mask=inside)
        tl.store(out + GAP, (a * sin + b * cos).to(q_out.dtype.element_ty), mask=inside)
    else:
        row = cache + slot * (LATENT + DIM)
        channel = tl.arange(0, BLOCK_LATENT)
        whole = channel < LATENT
        value = tl.load(latent + token * latent_pitch + channel, mask=whole, other=0).to(tl.float32)
        w = tl.load(weight + channel, mask=whole, other=0).to(tl.float32)
        value = value * (1.0 / tl.sqrt(tl.sum(value * value, axis=0) / LATENT + eps)) * w
        k_at, k_inside = pair[None, :] * STEP, (pair < DIM // 2)[None, :]
        key = k_rope + token * rope_pitch + k_at
        c = tl.load(key, mask=k_inside, other=0).to(tl.float32)
        d = tl.load(key + GAP, mask=k_inside, other=0).to(tl.float32)
        c, d = c * cos - d * sin, c * sin + d * cos
        only = tl.zeros((1,), dtype=tl.int32)  # the one key head
        store_cache(row + LATENT, k_scale, only, only == 0, c, d, DIM, GAP, BLOCK, FP8)
        if FP8:
            tl.store(row + channel, to_code(value, tl.load(k_scale)), mask=whole)
        else:
            tl.store(row + channel, value.to(cache.dtype.element_ty), mask=whole)


@dataclass(frozen=True, slots=True)
class MlaInput:
    """What the down and query projections left, all of one dtype; rows, and heads of q, may have a pitch.

    latent: [T, kv_lora]. k_rope: [T, rope_dim]. q_rope: [T, heads, rope_dim].
    norm: [kv_lora], the latent's norm weight. eps: of that norm.
    """

    latent: torch.Tensor
    k_rope: torch.Tensor
    q_rope: torch.Tensor
    norm: torch.Tensor
    eps: float


def store_mla(x: MlaInput, q_out: torch.Tensor, kv: PagedKv, rotation: Rotation) -> None:
    """Writes the normed latent and the rotated key to the cache, and the rotated query channels to `q_out`.

    Args:
        q_out: [T, heads, rope_dim] of x's dtype, any pitches: the last channels of the query of attention.
    Raises: InternalError for another shape, dtype or layout.
    """
    kv.check()
    tokens, heads, dim = x.q_rope.shape
    latent = x.latent.shape[1]
    if kv.layer.v is not None or kv.layer.k.shape[2:] != (1, latent + dim) or dim % 2:
        raise InternalError(f"cache: must be of one head of {latent} + {dim} channels and without v")
    expect("latent", x.latent, FLOATS, (tokens, latent), pitch=True)
    expect("k_rope", x.k_rope, x.latent.dtype, (tokens, dim), pitch=True)
    expect("norm", x.norm, x.latent.dtype, (latent,))
    for name, q in (("q_rope", x.q_rope), ("q_out", q_out)):
        rows = q[0] if tokens else q.flatten(0, 1)
        expect(name, rows, x.latent.dtype, (heads if tokens else 0, dim), pitch=True)
    rotation.check(tokens, dim)
    step, gap = rotation.steps(dim)
    if tokens:
        _store_mla_kernel[(tokens, 1 + -(-heads // BLOCK_HEADS))](
            x.latent, x.k_rope, x.q_rope, q_out, kv.layer.k, x.norm,
            rotation.table, rotation.positions, rotation.slots, kv.k_scale,
            x.latent.stride(0), x.k_rope.stride(0), *x.q_rope.stride()[:2], *q_out.stride()[:2], x.eps,
            Q_HEADS=heads, LATENT=latent, DIM=dim, STEP=step, GAP=gap, HEADS=BLOCK_HEADS,
            BLOCK=block(dim // 2), BLOCK_LATENT=block(latent), FP8=kv.fp8,
            **early(q_out, lets_next_start=True), num_warps=4,
        )  # fmt: skip
