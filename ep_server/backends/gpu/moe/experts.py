"""[8] The FFNs on a GPU: every local expert on the rows that came for it, and one FFN on all rows.

Counts of rows stay on the device. Weights are those of layers.py, prepared by TorchCompute.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ep_server.backends.gpu.kernels.hopper.experts import StreamedExperts, streamable
from ep_server.backends.gpu.kernels.triton.activation import silu_mul
from ep_server.backends.gpu.kernels.triton.expert_rows import ExpertRows, ExpertWeights
from ep_server.backends.gpu.kernels.triton.experts import run_experts
from ep_server.backends.torch_compute import TorchGatedFfn
from ep_server.exchange.api import Received


def streamed_experts(ffn: object) -> StreamedExperts | None:
    """The kernel for Hopper, where it is for these weights and their device."""
    weights = _weights_of(ffn)
    return StreamedExperts(weights) if streamable(weights) else None


def grouped(
    received: Received, ffn: object, each: int, streamed: StreamedExperts | None = None
) -> torch.Tensor:
    """Every local expert on the rows that came for it; each: rows of one to expect.

    Returns: [N, H] or [E_local, P, H], as combine_send takes it.
    """
    weights = _weights_of(ffn)
    given, down = ExpertRows.of(received), weights.down
    dtype = torch.bfloat16 if weights.fp8 else down.dtype
    rows = given.rows.shape[:2] if given.padded else [given.most]
    out = down.new_empty(*rows, down.shape[1], dtype=dtype)
    if streamed is not None and streamed.takes(given, each):
        scratch = down.new_empty(streamed.scratch_bytes(given.most), dtype=torch.uint8)
        streamed.run(given, scratch, out, rows_per_expert=each)
    else:
        hidden = down.new_empty(given.most, down.shape[2], dtype=dtype)
        run_experts(given, weights, hidden, out, rows_per_expert=each)
    return out


def dense(x: torch.Tensor, ffn: object) -> torch.Tensor:
    """The one gated FFN of `ffn` on all rows of x: [T, H]; library products."""
    assert isinstance(ffn, TorchGatedFfn)
    hidden = x.new_empty(len(x), ffn.down.shape[2])
    silu_mul(F.linear(x, ffn.gate_up[0]), hidden)
    return F.linear(hidden, ffn.down[0])


def _weights_of(ffn: object) -> ExpertWeights:
    """As the grouped products take them."""
    assert isinstance(ffn, TorchGatedFfn)
    return ExpertWeights(ffn.gate_up, ffn.down, *(ffn.scales or (None, None)))
