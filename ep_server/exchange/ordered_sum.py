"""Sums weighted rows in a fixed order on any device, bit for bit as csrc/exchange/shm/rows.hpp."""

from __future__ import annotations

import torch


def ordered_sum(rows: torch.Tensor, terms: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[M, H] float32: of each the sum over w, ascending, of weights[m, w] * rows[terms[m, w]], from +0.

    Products are rounded before they are added. Enqueues on the current stream, waits for nothing.

    Args:
        rows: [any, H] float32 or bfloat16; may have a pitch. Those that are no term are not looked at.
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
