"""Small tables that a GpuDirectExchange copies from the host to its device. Rows never pass the host."""

from __future__ import annotations

import torch

from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.copies import Copies, Slot
from ep_server.exchange.views import Views

TURNS = 4  # uploads on their way at once


class Staging:
    """ids, weights: of this rank's tokens on their way to the host. upload(): tables on their way back."""

    def __init__(self, spec: ExchangeSpec, views: Views, copies: Copies) -> None:
        choices, rows = (spec.max_tokens, spec.top_k), views.padded_rows
        entries = rows * min(spec.top_k, views.num_local)
        self.ids = copies.staging(choices, torch.int64)
        self.weights = copies.staging(choices, torch.float32)
        numbers = max(
            3 * entries + 3 * views.num_local + 1 + rows, 2 * entries + rows, choices[0] * choices[1]
        )
        factors = max(entries, rows, choices[0] * choices[1])
        self._copies, self._next = copies, 0
        self._turns = [
            (Slot(), copies.staging((numbers,), torch.int64), copies.staging((factors,), torch.float32))
            for _ in range(TURNS)
        ]

    def upload(
        self, tables: list[torch.Tensor], weights: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The same on the device; the caller's stream comes after the copies.

        Args:
            tables: int64 on the CPU, any shapes. weights: float32 on the CPU.
        """
        slot, numbers, factors = self._turns[self._next]
        self._next = (self._next + 1) % TURNS
        self._copies.reuse(slot)
        delivery = self._copies.delivery(slot)
        sizes = [each.numel() for each in tables]
        staged = torch.cat([each.flatten() for each in tables], out=numbers[: sum(sizes)])
        there = delivery.empty((len(staged),), torch.int64)
        delivery.copy(there, staged)
        moved = None
        if weights is not None:
            factors[: weights.numel()].copy_(weights.flatten())
            moved = delivery.empty(tuple(weights.shape), torch.float32)
            delivery.copy(moved.view(-1), factors[: weights.numel()])
        delivery.finish()
        split = torch.split(there, sizes)
        return [part.view(table.shape) for part, table in zip(split, tables, strict=True)], moved

    def drain(self) -> None:
        """Returns once no copy reads any of it."""
        for slot, _, _ in self._turns:
            self._copies.reuse(slot)
