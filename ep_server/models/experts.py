"""[8] What stands around the experts' arithmetic: received rows back to floats, one FFN for all rows, counts.

The arithmetic itself is `Compute.gated_ffn`. Knows nothing of routing, ranks or layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ep_server.exchange.api import Received
from ep_server.exchange.quant import dequantise
from ep_server.models.compute import GatedFfn

Tally = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def tally(rows: torch.Tensor, total: torch.Tensor, active: torch.Tensor) -> None:
    """total: [E] += sums over layers, active: [] += how many are not 0, rows: [layers, E] = 0."""
    active += torch.count_nonzero(rows)
    total += rows.sum(0)
    rows.zero_()


class ExpertCounter:
    """Rows that this rank's experts received.

    rows: one [E_local] of `dtype` per layer, to be added to during a step.
    total: [E_local] int64, of all steps before.
    active: [] int64, experts with at least one row, added up over layers and steps.

    Args:
        tally: what a step ends with.
    """

    def __init__(
        self,
        layers: int,
        local_experts: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.int64,
        tally: Tally = tally,
    ) -> None:
        self._tally = tally
        self._step = torch.zeros(layers, local_experts, dtype=dtype, device=device)
        self.rows = self._step.unbind()
        self.total = torch.zeros(local_experts, dtype=torch.int64, device=device)
        self.active = torch.zeros((), dtype=torch.int64, device=device)

    def finish(self) -> None:
        """The step ended."""
        self._tally(self._step, self.total, self.active)


def dense_ffn(x: torch.Tensor, ffn: GatedFfn) -> torch.Tensor:
    """All rows of x: [T, H] through the one FFN there is: [T, H]."""
    return ffn(x, torch.tensor([0, len(x)], device=x.device))


def received_rows(received: Received, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a compact receive as [N, H] of `dtype`; FP8 rows are multiplied by their scales."""
    if received.scales is None:
        return received.rows.to(dtype)
    return dequantise(received.rows, received.scales).to(dtype)
