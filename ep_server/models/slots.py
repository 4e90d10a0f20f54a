"""From a router's experts to the slots that serve them, the physical experts of the exchange; and back.

A placement says which expert each slot holds, layer by layer. It changes while the ranks serve. Shapes use
E experts of a layer, S slots of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ep_server.records import EMPTY, WAYS

# By layer, by expert: slots to choose from; token t takes t % ways.
Routes = Sequence[Sequence[Sequence[int]]] | np.ndarray
Held = Sequence[Sequence[int]]  # by layer, by slot of this rank: the expert, or EMPTY


class SlotTable:
    """For the tokens of one rank: the slots that serve each expert.

    slots: [layers, WAYS, E] int32 on the device: token t takes way t % WAYS. Changes in place, so captured
      graphs that read it stay valid.
    """

    def __init__(self, layers: int, experts: int, device: torch.device | None = None) -> None:
        self.slots = torch.zeros(layers, WAYS, experts, dtype=torch.int32, device=device)
        self._first = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self._replicated = False
        self._ways = torch.zeros(0, 1, dtype=torch.int64, device=device)  # of the most tokens so far

    def set(self, routes: Routes) -> None:
        """Changes the table for work enqueued from here on. On a GPU nothing waits for work before."""
        table = torch.from_numpy(np.asarray(routes, dtype=np.int32)).transpose(1, 2)
        self._replicated = bool((table != table[:, :1]).any())
        staged = torch.empty(table.shape, dtype=table.dtype, pin_memory=self.slots.is_cuda)
        self.slots.copy_(staged.copy_(table), non_blocking=True)
        self._first.copy_(self.slots[:, 0])

    def of(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """The slots of a step's choices. ids: [T, K] int64 of experts. Returns: the same shape."""
        if not self._replicated:
            return self._first[layer].take(ids)
        if len(self._ways) < len(ids):
            self._ways = (torch.arange(len(ids), device=ids.device) % WAYS)[:, None]
        return self.slots[layer][self._ways[: len(ids)], ids].long()


class ExpertRows:
    """Rows that this rank received for each expert, from counts of its slots, whatever these held."""

    def __init__(self, experts: int, held: Held) -> None:
        self._held = np.array(held, dtype=np.int64)
        self._before = np.zeros((len(held), experts), dtype=np.int64)
        self._base = np.zeros(self._held.shape, dtype=np.int64)

    def of(self, counts: np.ndarray) -> np.ndarray:
        """[layers, E] int64. counts: [layers, S] int64, cumulative."""
        found = self._before.copy()
        layers, slots = np.nonzero(self._held != EMPTY)
        np.add.at(found, (layers, self._held[layers, slots]), (counts - self._base)[layers, slots])
        return found

    def moved(self, counts: np.ndarray, held: Held) -> None:
        """The slots hold other experts from now on. counts: up to now."""
        self._before, self._base = self.of(counts), counts.copy()
        self._held = np.array(held, dtype=np.int64)

    def by_expert(self, counts: np.ndarray) -> dict[int, int]:
        """Rows of all layers, by expert: of those held now, and of those with any."""
        totals = self.of(counts).sum(0)
        shown = set(self._held[self._held != EMPTY].tolist()) | set(np.nonzero(totals)[0].tolist())
        return {expert: int(totals[expert]) for expert in sorted(shown)}
