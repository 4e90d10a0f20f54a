"""[8] What stands around the experts' arithmetic: received rows back to floats, one FFN for all rows.

The arithmetic itself is `Compute.gated_ffn`. Knows nothing of routing, ranks or layers.
"""

from __future__ import annotations

import torch

from ep_server.ep.exchange import Received
from ep_server.ep.quant import dequantise
from ep_server.model.compute import GatedFfn


def dense_ffn(x: torch.Tensor, ffn: GatedFfn) -> torch.Tensor:
    """All rows of x: [T, H] through the one FFN there is: [T, H]."""
    return ffn(x, torch.tensor([0, len(x)]))


def received_rows(received: Received, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a compact receive as [N, H] of `dtype`; FP8 rows are multiplied by their scales."""
    if received.scales is None:
        return received.rows.to(dtype)
    return dequantise(received.rows, received.scales).to(dtype)
