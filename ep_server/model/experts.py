"""The experts' arithmetic: gated FFNs over rows grouped by expert, and received rows back to floats.

`expert_ffn` is the one function a faster kernel replaces. Knows nothing of routing, ranks or layers.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from ep_server.ep.exchange import Received
from ep_server.ep.quant import dequantise
from ep_server.model.layers import ExpertWeights, FfnWeights


def ffn(x: torch.Tensor, w: FfnWeights) -> torch.Tensor:
    """Dense gated FFN: x: [T, H] to [T, H]."""
    return F.linear(_silu_gate(F.linear(x, w.gate_up)), w.down)


def expert_ffn(rows: torch.Tensor, offsets: torch.Tensor, w: ExpertWeights) -> torch.Tensor:
    """Runs each expert on its rows.

    Args:
        rows: [N, H], rows of expert e at offsets[e] .. offsets[e + 1]. offsets: [E_local + 1] int64.
    Returns: [N, H] in the same order.
    """
    bounds = offsets.tolist()
    hidden = rows.new_empty(len(rows), w.gate_up.shape[1])
    busy = [(e, a, b) for e, (a, b) in enumerate(pairwise(bounds)) if a < b]
    for e, a, b in busy:
        torch.mm(rows[a:b], w.gate_up[e].t(), out=hidden[a:b])
    gated = _silu_gate(hidden)
    out = torch.empty_like(rows)
    for e, a, b in busy:
        torch.mm(gated[a:b], w.down[e].t(), out=out[a:b])
    return out


def received_rows(received: Received, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a compact receive as [N, H] of `dtype`; FP8 rows are multiplied by their scales."""
    if received.scales is None:
        return received.rows.to(dtype)
    return dequantise(received.rows, received.scales).to(dtype)


def _silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
