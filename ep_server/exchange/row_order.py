"""The order of received rows on a device, their three views, and sums of rows in a fixed order.

Torch operations only. Nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.exchange.api import Received, View
from ep_server.exchange.shapes import Shapes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same as uint8 where elements are one byte: rows of FP8 are only moved."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@dataclass(frozen=True, slots=True)
class Order:
    """Where the entries of a receive are, sorted by (local expert, source, token); all on one device.

    counts: [E_local] int32, rows per expert. offsets: [E_local + 1] int64, before each expert.
    entry: [N] int64, the row that each entry reads. experts, positions: [N] int64, its place when PADDED.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    entry: torch.Tensor
    experts: torch.Tensor
    positions: torch.Tensor

    def received(self, rows: list[torch.Tensor], view: View, shapes: Shapes, handle: object) -> Received:
        """Received rows, and scales if any, in the layout of a view.

        Args:
            rows: [M, C] each, in the order that `entry` numbers; INDEX keeps them.
        """
        if view is View.COMPACT:
            rows = [self._spread(each) for each in rows]
        elif view is View.PADDED:
            padded = [each for each in shapes.padded() if each is not None]
            for each, of_expert in zip(rows, padded, strict=True):
                as_bytes(of_expert)[self.experts, self.positions] = as_bytes(self._spread(each))
            rows = padded
        scales, ids = rows[1] if len(rows) > 1 else None, self.entry if view is View.INDEX else None
        return Received(rows[0], self.counts, self.offsets, handle, view, scales, ids)

    def outputs(self, expert_out: torch.Tensor, view: View, shapes: Shapes) -> torch.Tensor:
        """[N, H], one for each entry. Raises InvalidArgument unless expert_out has the layout of `view`."""
        shapes.check_outputs(expert_out, view, len(self.entry))
        return expert_out[self.experts, self.positions] if view is View.PADDED else expert_out

    def _spread(self, rows: torch.Tensor) -> torch.Tensor:
        return as_bytes(rows).index_select(0, self.entry).view(rows.dtype)


def places(inner: Received, entry: torch.Tensor) -> list[torch.Tensor]:
    """Offsets, entries, experts and positions of an Order. inner: on the CPU. entry: [N] rows."""
    experts = torch.repeat_interleave(inner.counts.long())
    return [inner.offsets, entry, experts, torch.arange(len(experts)) - inner.offsets[experts]]


def ordered_sum(rows: torch.Tensor, terms: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[M, H] float32: of each the sum over w, ascending, of weights[m, w] * rows[terms[m, w]], from +0.

    Products are rounded before they are added. Enqueues on the current stream, waits for nothing.

    Args:
        rows: [any, H] float32 or bfloat16; may have a pitch. Rows that are no term are not read.
        terms: [M, W] int64, -1 = none. weights: [M, W] float32.
    """
    total = rows.new_zeros((len(terms), rows.shape[1]), dtype=torch.float32)
    if not len(rows):  # then no sum has a term
        return total
    nothing = total.new_zeros(())
    for each, weight in zip(terms.unbind(1), weights.unbind(1), strict=True):
        product = rows.index_select(0, each.clamp(min=0)).float() * weight[:, None]
        total += torch.where((each >= 0)[:, None], product, nothing)
    return total
