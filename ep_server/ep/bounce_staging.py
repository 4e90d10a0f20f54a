"""Host memory that a BounceExchange copies through, and the order of the rows that lie in it.

Allocated once, as large as the spec allows any operation to be. What is sent needs it once: the host waits
until it is filled, and the inner exchange has read it when its send returns. What comes needs it for every
bank: copies to the device may still read the last operation's when the next one is received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.ep.bounce_copies import Copies, Delivery, Slot
from ep_server.ep.exchange import ExchangeSpec, Received
from ep_server.ep.views import Views

CHUNK_BYTES = 256 << 10  # gathered on the host while the last chunk travels to the device


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same as uint8 where elements are one byte: rows of FP8 are moved, never computed with."""
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

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [M, C] as [N, C], one for each entry."""
        return as_bytes(rows).index_select(0, self.entry).view(rows.dtype)

    def pad(self, rows: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        """Rows [M, C] into a PADDED tensor [E_local, R * max_tokens, C]."""
        as_bytes(padded)[self.experts, self.positions] = as_bytes(self.spread(rows))
        return padded

    def gather(self, padded: torch.Tensor) -> torch.Tensor:
        """Entries [N, C] of a PADDED tensor."""
        return padded[self.experts, self.positions]


class Landing:
    """Staging of one bank's receive: a row and its scales for each token of each rank, and the order."""

    def __init__(self, spec: ExchangeSpec, views: Views, copies: Copies, entries: int) -> None:
        self.slot = Slot()
        self._staged = [copies.staging((views.padded_rows, spec.hidden), views.row_dtype)]
        if views.fp8:
            self._staged.append(copies.staging((views.padded_rows, views.groups), views.scale_dtype))
        self._counts = copies.staging((views.num_local,), torch.int32)
        self._tables = copies.staging((3 * entries + views.num_local + 1,), torch.int64)

    def bring(self, inner: Received, delivery: Delivery, *, whole: bool) -> tuple[Order, list[torch.Tensor]]:
        """Begins the copies of what came; reads `inner` for the last time.

        Args:
            inner: an INDEX view. whole: tensors of R * max_tokens rows, of which only what came is written.
        Returns: the order, and [M, C] rows and scales, if any, on the device: those that came, by region row.
        """
        assert inner.row_ids is not None
        used, entry = torch.unique(inner.row_ids, return_inverse=True)
        order = self._deliver(inner, entry, delivery)
        regions = [inner.rows] if inner.scales is None else [inner.rows, inner.scales]
        length = len(self._staged[0]) if whole else len(used)
        made = [delivery.empty((length, staged.shape[1]), staged.dtype) for staged in self._staged]
        step = max(1, CHUNK_BYTES // (self._staged[0].shape[1] * self._staged[0].element_size()))
        for begin in range(0, len(used), step):
            end = min(begin + step, len(used))
            for region, staged, out in zip(regions, self._staged, made, strict=True):
                torch.index_select(as_bytes(region), 0, used[begin:end], out=as_bytes(staged[begin:end]))
                delivery.copy(out[begin:end], staged[begin:end])
        return order, made

    def _deliver(self, inner: Received, entry: torch.Tensor, delivery: Delivery) -> Order:
        """Tables of the order travel in one copy, beside the counts."""
        experts = torch.repeat_interleave(inner.counts.long())
        positions = torch.arange(len(experts)) - inner.offsets[experts]
        values = torch.cat([inner.offsets, entry, experts, positions])
        staged = self._tables[: len(values)]
        staged.copy_(values)
        self._counts.copy_(inner.counts)
        tables = delivery.empty(tuple(values.shape), torch.int64)
        counts = delivery.empty(tuple(self._counts.shape), torch.int32)
        delivery.copy(tables, staged)
        delivery.copy(counts, self._counts)
        lengths = [len(each) for each in (inner.offsets, entry, experts, positions)]
        return Order(counts, *torch.split(tables, lengths))

    def tensors(self) -> list[torch.Tensor]:
        """All that was allocated."""
        return [*self._staged, self._counts, self._tables]


class Home:
    """Staging of one bank's sums on their way back."""

    def __init__(self, spec: ExchangeSpec, views: Views, copies: Copies) -> None:
        self.slot = Slot()
        self.rows = copies.staging((spec.max_tokens, spec.hidden), views.combine_dtype)


class Staging:
    """All of one exchange.

    x, ids, weights: of this rank's tokens. answers: of its experts. Landings and homes take turns.
    """

    def __init__(self, spec: ExchangeSpec, views: Views, copies: Copies) -> None:
        choices, self.region_rows = (spec.max_tokens, spec.top_k), views.padded_rows
        entries = views.padded_rows * min(spec.top_k, views.num_local)
        self.x = copies.staging((spec.max_tokens, spec.hidden), views.combine_dtype)
        self.ids = copies.staging(choices, torch.int64)
        self.weights = copies.staging(choices, torch.float32)
        self.answers = copies.staging((entries, spec.hidden), views.combine_dtype)
        self._landings = [Landing(spec, views, copies, entries) for _ in range(spec.num_banks)]
        self._homes = [Home(spec, views, copies) for _ in range(spec.num_banks)]
        self._landed = self._returned = 0

    def landing(self) -> Landing:
        """The next one; reuse its slot first."""
        self._landed += 1
        return self._landings[self._landed % len(self._landings)]

    def home(self) -> Home:
        """The next one; reuse its slot first."""
        self._returned += 1
        return self._homes[self._returned % len(self._homes)]

    def drain(self, copies: Copies) -> None:
        """Returns once no copy reads any of it."""
        for slot in [each.slot for each in self._landings] + [each.slot for each in self._homes]:
            copies.reuse(slot)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        tensors = [self.x, self.ids, self.weights, self.answers]
        for landing in self._landings:
            tensors += landing.tensors()
        tensors += [home.rows for home in self._homes]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
