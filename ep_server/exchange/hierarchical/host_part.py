"""One host's part in an exchange of several hosts: its ranks, experts, ids and rows.

Splits routing into ids inside the host and ids outside it, and joins the rows of both in one order. Uses
torch operations only, and waits for no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.exchange.api import ExchangeSpec, Received, View
from ep_server.exchange.fabric.host_staging import ReceivedRows
from ep_server.exchange.row_order import Order
from ep_server.exchange.spec import experts_of


class IdSplit:
    """Splits choices by where their experts are.

    An invalid id stays invalid in both halves, so either exchange refuses it.
    """

    def __init__(self, spec: ExchangeSpec, ranks: range, device: torch.device) -> None:
        here = {e: i for i, e in enumerate(experts_of(spec, ranks))}
        count = spec.num_experts
        intra = [here.get(e, -1) for e in range(count)]
        inter = [-1 if e in here else e for e in range(count)]
        unknown = max(len(here), 1)
        rows = [[-2, -1, *intra, unknown], [-2, -1, *inter, count]]  # of the ids -2, -1, 0, ..., E
        self._last = count
        self._table = torch.tensor(rows, dtype=torch.int64).to(device)

    def __call__(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids: [T, K] int64. Returns: ids inside the host, and global ids of experts elsewhere; -1 = not."""
        at = ids.clamp(-2, self._last).add_(2).flatten()
        intra, inter = self._table.index_select(1, at).view(2, *ids.shape).unbind(0)
        return intra, inter


class InterTables:
    """Makes the tables that go to the device with rows of other hosts: their places among all rows."""

    def __init__(self, spec: ExchangeSpec, ranks: range) -> None:
        self._tokens, self._padded, self._ranks = spec.max_tokens, spec.num_ranks * spec.max_tokens, ranks

    def __call__(self, inner: Received, entry: torch.Tensor) -> list[torch.Tensor]:
        """int64 tables of a receive whose sources are on other hosts.

        Args:
            inner: an INDEX view on the CPU, whose rows are in the regions of all ranks of the host.
            entry: [N] row of each entry.
        Returns: entry; after [N], the number of experts whose intra rows precede an entry; shift [E_local],
          the number of inter rows before the first intra row of an expert.
        """
        assert inner.row_ids is not None
        experts = torch.repeat_interleave(inner.counts.long())
        sources = inner.row_ids % self._region(len(inner.rows)) // self._tokens
        behind = sources >= self._ranks.start
        before = torch.bincount(experts[~behind], minlength=len(inner.counts))
        return [entry, experts + behind, inner.offsets[:-1] + before]

    def _region(self, rows: int) -> int:
        """Rows from one rank's region to the next. rows: of all of the host."""
        others = len(self._ranks) - 1
        return max(self._padded, (rows - self._padded) // others) if others else self._padded


@dataclass(frozen=True, slots=True)
class Joined:
    """Rows of both parts in one order. intra_at, inter_at: int64, places of their entries among all N.

    The rows themselves are stored part by part: intra rows by entry, then each inter row once.
    """

    order: Order
    intra_at: torch.Tensor
    inter_at: torch.Tensor


def entries_of(intra: Received) -> int:
    """Rows of its experts."""
    return len(intra.rows if intra.row_ids is None else intra.row_ids)


def join(intra: Received, inter: ReceivedRows, view: View) -> Joined:
    """By (local expert, source, token).

    Args:
        intra: an INDEX view of the host's exchange, cut to the rows received, or a COMPACT one.
        inter: with the tables of InterTables.
        view: that will be made of it.
    """
    entry, after, shift = inter.tables
    experts, here = len(inter.counts), entries_of(intra)
    begins = intra.offsets[: experts + 1]
    numbers = torch.arange(here + len(entry), device=entry.device)
    intra_at = numbers[:here] + shift.index_select(0, _expert_of(numbers[:here], begins))
    inter_at = numbers[: len(entry)] + begins.index_select(0, after)
    rows = torch.empty(len(numbers), dtype=torch.int64, device=entry.device)
    rows.index_copy_(0, intra_at, numbers[:here])
    rows.index_copy_(0, inter_at, entry + here)
    counts = intra.counts[:experts] + inter.counts
    offsets = torch.zeros_like(begins)
    torch.cumsum(counts, 0, out=offsets[1:])
    expert = position = numbers[:0]
    if view is View.PADDED:
        expert = _expert_of(numbers, offsets)
        position = numbers - offsets.index_select(0, expert)
    return Joined(Order(counts, offsets, rows, expert, position), intra_at, inter_at)


def _expert_of(numbers: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """The expert of each entry. begins: [E + 1]."""
    return torch.searchsorted(begins[1:], numbers, right=True)
