"""The exchange of many rows at once, for steps where bytes count and not the latency of one kernel.

A dispatch is planned first: every rank learns how many rows it receives, in the order of (source, token).
Rows travel as they are, once to each rank that has an expert of theirs. A combine sums rows without weights,
in float32 and in rank order. All calls are collective, in the same order on all ranks. Rows start at
multiples of 16 bytes, as does their length.

Symbols: T tokens of this rank, R ranks, N received rows, H channels, K choices, E_local experts per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ep_server.errors import ConfigError, InvalidArgument
from ep_server.exchange.api import Exchange, View
from ep_server.exchange.spec import MAX_TOP_K


@dataclass(frozen=True, slots=True)
class Routing:
    """What a plan needs to know.

    in_rank: [T, R] bool. expert_tokens: [E] int32, this rank's tokens for each expert.
    alignment: of the numbers of rows per expert in Plan.expert_rows.
    """

    in_rank: torch.Tensor
    expert_tokens: torch.Tensor
    alignment: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Where rows go. It can be used again.

    prefix: [R, R] int32, [s, d] = rows of sources 0 .. s for rank d.
    places: [T, R] int32, number of a token's row among this rank's rows for a rank, or -1.
    """

    prefix: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that are sent, [T, ...], or received, [N, ...].

    x: bfloat16 or float8_e4m3fn [., H]. scales: float32 or int32 [., G] or None, any strides if sent.
    ids: int64 [., K] or None; sent: of all experts, received: of this rank's, -1 for others.
    weights: float32 [., K] with ids; received: 0 for experts of other ranks.
    """

    x: torch.Tensor
    scales: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """How many rows a dispatch receives.

    worst: room for so many although fewer may arrive; behind the last one ids are -1.
    with_sources: also return each row's token number at its source.
    """

    rows: int
    local_experts: int = 0
    worst: bool = False
    with_sources: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """Rows that a combine returns: x bfloat16 [N, H], weights float32 [N, K] or None, and up to two biases.

    bias: bfloat16 [T, H] each, added to the sums before they are rounded.
    """

    x: torch.Tensor
    weights: torch.Tensor | None = None
    bias: tuple[torch.Tensor, ...] = ()


class BulkExchange(Protocol):
    """One rank's end."""

    def plan(self, routing: Routing, *, report: bool) -> tuple[Plan, tuple[int, list[int]] | None]:
        """The plan, and with `report` N and the rows of each local expert, for which the host waits."""
        ...

    def dispatch(
        self, rows: Rows, plan: Plan, arrival: Arrival, num_sms: int
    ) -> tuple[Rows, torch.Tensor | None]:
        """Received rows, and their tokens' numbers [N] int32 if wanted. num_sms: of NVLink's kernels."""
        ...

    def combine(
        self, returned: Returned, plan: Plan, num_sms: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums [T, H] bfloat16 and, if there are weights, their sums [T, K] float32."""
        ...

    def reset(self) -> None:
        """Starts again after an error. Every rank calls it, with no call in flight. Plans stay valid."""
        ...

    def close(self) -> None:
        """Frees all memory; idempotent."""
        ...


OpenRows = Callable[[int, int], Exchange]  # (tokens, bytes per row): BF16 rows, rank r has expert r alone
MAX_OPEN = 4
MOST_PADDED = 1.25  # times the bytes of a row
SAME_ON_ALL = {"hidden", "spec"}  # fields of an exchange that differ where rows differ between ranks


class ExchangeBulk:
    """A BulkExchange over an Exchange with one expert per rank, which moves rows as bytes.

    Args:
        open_rows: makes such an exchange of tensors on `device`, collectively.
    """

    def __init__(self, rank: int, num_ranks: int, open_rows: OpenRows, device: torch.device) -> None:
        if num_ranks > MAX_TOP_K:
            allowed = f"at most {MAX_TOP_K} on CPUs or several hosts"
            raise InvalidArgument("group", f"{num_ranks} ranks", allowed)
        self._rank, self._num_ranks, self._open_rows, self._device = rank, num_ranks, open_rows, device
        self._exchanges: dict[tuple[int, int], Exchange] = {}  # least recently used first

    def plan(self, routing: Routing, *, report: bool) -> tuple[Plan, tuple[int, list[int]] | None]:
        """See BulkExchange."""
        sent = routing.in_rank.sum(0, dtype=torch.int32)
        mine = torch.cat([sent, routing.expert_tokens.to(torch.int32)])
        all_counts = self._gather(mine.contiguous())
        prefix = all_counts[:, : self._num_ranks].cumsum(0, dtype=torch.int32)
        numbers = routing.in_rank.cumsum(0, dtype=torch.int32) - 1
        plan = Plan(prefix, torch.where(routing.in_rank, numbers, -1).to(torch.int32))
        if not report:
            return plan, None
        local = routing.expert_tokens.shape[0] // self._num_ranks
        begin = self._num_ranks + self._rank * local
        counts = all_counts[:, begin : begin + local].sum(0)
        aligned = (counts + routing.alignment - 1) // routing.alignment * routing.alignment
        return plan, (int(prefix[-1, self._rank]), [int(count) for count in aligned])

    def dispatch(
        self, rows: Rows, plan: Plan, arrival: Arrival, num_sms: int
    ) -> tuple[Rows, torch.Tensor | None]:
        """See BulkExchange."""
        parts = [part for part in (rows.x, rows.scales, rows.ids, rows.weights) if part is not None]
        tokens = rows.x.shape[0]
        numbers = torch.arange(tokens, dtype=torch.int32, device=self._device).view(-1, 1)
        received = self._move([*parts, numbers], plan.places >= 0)
        if arrival.worst:
            received = [_padded(part, arrival.rows) for part in received]
        *found, sources = received
        kept = iter(found)
        x = next(kept)
        scales = None if rows.scales is None else next(kept)
        ids = weights = None
        if rows.ids is not None:
            ids, weights = self._local(next(kept), next(kept), plan, arrival)
        return Rows(x, scales, ids, weights), sources.view(-1) if arrival.with_sources else None

    def combine(
        self, returned: Returned, plan: Plan, num_sms: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See BulkExchange."""
        ends = plan.prefix[:, self._rank].to(torch.int64)
        count, tokens = int(ends[-1]), plan.places.shape[0]
        source = torch.searchsorted(ends, torch.arange(count, device=self._device), right=True)
        to = torch.zeros(count, self._num_ranks, dtype=torch.bool, device=self._device)
        to[torch.arange(count, device=self._device), source] = True
        parts = [returned.x[:count]] + ([] if returned.weights is None else [returned.weights[:count]])
        received = self._move(parts, to)
        sums = [torch.zeros(tokens, p.shape[1], dtype=torch.float32, device=self._device) for p in parts]
        for bias in returned.bias:
            sums[0] += bias.float()
        begin = 0
        for rank in range(self._num_ranks):
            to_token = (plan.places[:, rank] >= 0).nonzero().view(-1)
            end = begin + to_token.shape[0]
            for total, part in zip(sums, received, strict=True):
                total[to_token] += part[begin:end].float()
            begin = end
        return sums[0].to(torch.bfloat16), None if returned.weights is None else sums[1]

    def reset(self) -> None:
        """See BulkExchange. Ranks may have opened different exchanges before the error: all are closed."""
        self.close()

    def close(self) -> None:
        """See BulkExchange."""
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()

    def _local(
        self, ids: torch.Tensor, weights: torch.Tensor, plan: Plan, arrival: Arrival
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Received ids as this rank numbers its experts."""
        local = ids - self._rank * arrival.local_experts
        here = (local >= 0) & (local < arrival.local_experts)
        here[int(plan.prefix[-1, self._rank]) :] = False
        return torch.where(here, local, -1), torch.where(here, weights, 0.0)

    def _move(self, parts: list[torch.Tensor], to: torch.Tensor) -> list[torch.Tensor]:
        """Rows of several tensors [n, .] to the ranks of `to` [n, R]; received in (source, row) order."""
        columns = [part.contiguous().view(torch.uint8) for part in parts]
        packed = torch.cat(columns, 1)
        received = self._move_bytes(packed, to, self._most(packed.shape[0]))
        found, begin = [], 0
        for part, column in zip(parts, columns, strict=True):
            end = begin + column.shape[1]
            found.append(received[:, begin:end].contiguous().view(part.dtype))
            begin = end
        return found

    def _most(self, rows: int) -> int:
        """The largest number of rows that a rank sends, rounded up so that few exchanges are made."""
        counts = self._gather(torch.tensor([rows], dtype=torch.int32, device=self._device))
        return 1 << max(int(counts.max()) - 1, 0).bit_length()

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        """int32 [n] of every rank: [R, n]."""
        to = torch.ones(1, self._num_ranks, dtype=torch.bool, device=self._device)
        return self._move_bytes(mine.view(1, -1).view(torch.uint8), to, 1).contiguous().view(torch.int32)

    def _move_bytes(self, rows: torch.Tensor, to: torch.Tensor, most: int) -> torch.Tensor:
        count, width = rows.shape
        exchange, row_bytes = self._exchange(most, -(-width // 64) * 64)
        ranks = torch.arange(self._num_ranks, device=self._device)
        block = torch.zeros(count, row_bytes, dtype=torch.uint8, device=self._device)
        block[:, :width] = rows
        ids = torch.where(to, ranks, -1)
        weights = torch.ones(to.shape, dtype=torch.float32, device=self._device)
        pending = exchange.dispatch_send(block.view(torch.bfloat16), ids, weights)
        return pending.recv(View.COMPACT).rows.view(torch.uint8)[:, :width]

    def _exchange(self, tokens: int, row_bytes: int) -> tuple[Exchange, int]:
        """An open one with room for such rows, else a new one; and the length of its rows.

        All ranks have the same ones open, so they choose alike.
        """
        for key in self._exchanges:
            fits = tokens <= key[0] and row_bytes <= key[1] <= row_bytes * MOST_PADDED
            if fits and (tokens > 1) == (key[0] > 1):
                break
        else:
            key = (tokens, row_bytes)
        exchange = self._exchanges.pop(key, None)
        if exchange is None:
            if len(self._exchanges) == MAX_OPEN:
                self._exchanges.pop(next(iter(self._exchanges))).close()
            exchange = self._opened(tokens, row_bytes)
        self._exchanges[key] = exchange
        return exchange, key[1]

    def _opened(self, tokens: int, row_bytes: int) -> Exchange:
        try:
            return self._open_rows(tokens, row_bytes)
        except ConfigError as error:
            if error.field not in SAME_ON_ALL:
                raise InvalidArgument(error.field, error.value, error.allowed) from error
            given = f"{row_bytes} bytes a row, with what goes along"
            raise InvalidArgument("x", given, f"the same on all ranks: {error}") from error


def _padded(part: torch.Tensor, rows: int) -> torch.Tensor:
    """With so many rows; the new ones are zero."""
    if part.shape[0] > rows:
        raise InvalidArgument("num_worst_tokens", rows, f"at least the {part.shape[0]} rows received")
    out = part.new_zeros((rows, *part.shape[1:]))
    out.view(torch.uint8)[: part.shape[0]] = part.view(torch.uint8)
    return out
