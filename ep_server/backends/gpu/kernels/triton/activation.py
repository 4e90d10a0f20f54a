"""The gate of a dense FFN whose two products come from a library: out = silu(gate) * up, float32 inside.

One program per tile of channels of a row; channels past `width` are masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.checks import FLOATS, block, expect

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up, out, pitch, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    at = gate_up + row * pitch + channel
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + channel, gated.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Gates rows.

    Args:
        gate_up: [T, 2 * I], gate channels first; rows may have a pitch. out: [T, I] of its dtype.
    Raises: InternalError for another shape, dtype or layout.
    """
    rows, width = out.shape
    expect("gate_up", gate_up, FLOATS, (rows, 2 * width), pitch=True)
    expect("out", out, gate_up.dtype, (rows, width))
    size = min(block(width), _BLOCK)
    if out.numel():
        _silu_mul_kernel[(rows, -(-width // size))](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=size, num_warps=4
        )
