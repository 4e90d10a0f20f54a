"""The order of received rows, as tensors of positions: (local expert, source rank, source token), ascending.

Knows ids alone; nothing of payloads or communication.
"""

from __future__ import annotations

import torch


def pad_rows(rows: torch.Tensor, length: int, value: int) -> torch.Tensor:
    """[T, C] to [length, C], the rest filled with `value`."""
    padded = torch.full((length, rows.shape[1]), value, dtype=rows.dtype)
    padded[: len(rows)] = rows
    return padded


def entries_of(ids: torch.Tensor, local_experts: tuple[int, ...]) -> torch.Tensor:
    """[N, 4] (local expert, source, token, k) of every routed choice of the experts given, in that order."""
    found = [
        torch.cat([torch.full((len(hits), 1), local), hits], dim=1)
        for local, expert in enumerate(local_experts)
        for hits in [(ids == expert).nonzero()]
    ]
    return torch.cat(found) if found else torch.empty(0, 4, dtype=torch.int64)


def slots_of(entries: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
    """[N] position of each entry in a flattened [experts, capacity] table."""
    expert = entries[:, 0]
    counts = torch.bincount(expert, minlength=experts)
    first = counts.cumsum(0) - counts
    return expert * capacity + torch.arange(len(entries)) - first[expert]
