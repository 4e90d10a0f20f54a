"""The first kernel of a step: each row's token, its embedding, and the first layer's norm of it.

    token     ids[row]; if sources[row] is a place, the token that the last step drew there
    residual  embedding[token]
    out       rms_norm(residual), as in norm.py

One program per row. A negative token, which could not be drawn, reads as token 0: its request has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import (
    FLOATS,
    after_previous,
    block,
    early,
    expect,
    expect_range,
)
from ep_server.backends.gpu.kernels.triton.norm import (
    MAX_DIM,
    load_wide,
    store_normed,
    store_stream,
    warps_for,
)


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Where the tokens of T rows are. ids, sources: [T] int32; a source is a place in drawn, or negative.

    drawn: [..] int64.
    """

    ids: torch.Tensor
    sources: torch.Tensor
    drawn: torch.Tensor


@triton.jit
def _embed_kernel(
    ids, sources, drawn, embedding, weight, residual, out, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = channel < DIM
    w = load_wide(weight + channel, inside)
    after_previous(EARLY)
    source = tl.load(sources + row)
    last = tl.load(drawn + source, mask=source >= 0, other=0)
    token = tl.where(source >= 0, tl.maximum(last, 0), tl.load(ids + row).to(tl.int64))
    value = load_wide(embedding + token * DIM + channel, inside)
    value = store_stream(residual + row * DIM + channel, value, inside)
    store_normed(out + row * DIM + channel, value, w, inside, eps, DIM)


def embed(
    rows: RowTokens,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Fills residual and out: [T, H].

    Args:
        embedding: [V, H]; ids and drawn tokens are below V. weight: [H]. All of one dtype, contiguous.
    Raises: InternalError for another shape, dtype or layout.
    """
    count, dim = len(rows.ids), embedding.shape[-1]
    expect_range("dim", dim, 1, MAX_DIM)
    expect("ids", rows.ids, torch.int32, (None,))
    expect("sources", rows.sources, torch.int32, (count,))
    expect("drawn", rows.drawn, torch.int64, (None,))
    expect("embedding", embedding, FLOATS, (None, dim))
    expect("weight", weight, embedding.dtype, (dim,))
    expect("residual", residual, embedding.dtype, (count, dim))
    expect("out", out, embedding.dtype, (count, dim))
    if count:
        size = block(dim)
        # The next kernel is set up only after this one: it may read the step's inputs before it waits.
        _embed_kernel[(count,)](
            rows.ids, rows.sources, rows.drawn, embedding, weight, residual, out, eps,
            DIM=dim, BLOCK=size, **early(out), num_warps=warps_for(size),
        )  # fmt: skip
