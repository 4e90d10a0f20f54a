"""The exchanges behind a Buffer: one for each combination of sizes that its calls have asked for.

An arena is made by the first call that needs it, collectively: all ranks make the same calls in one order.
Owns their lifetime and keeps their masks alike; knows nothing of tensors' layouts. Units: bytes, ns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ep_server import _C
from ep_server.ep import bootstrap
from ep_server.ep.exchange import ExchangeSpec, Payload, Reduction
from ep_server.ep.geometry import geometry_of
from ep_server.ep.native import NativeExchange
from ep_server.errors import ConfigError, InvalidArgument

NUM_BANKS = 4  # operations in flight: two micro-batches and the next one of each
MAX_ARENAS = 8  # the least recently used is closed beyond it


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an exchange is made for. Experts lie on the ranks in contiguous blocks as equal as can be."""

    max_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    payload: Payload

    def spec(self, rank: int, num_ranks: int, timeout_ns: int) -> ExchangeSpec:
        """The exchange of these sizes; SOURCE, which has room for both reductions."""
        share, more = divmod(self.num_experts, num_ranks)
        placement = [rank for rank in range(num_ranks) for _ in range(share + (rank < more))]
        return ExchangeSpec(
            rank=rank,
            num_ranks=num_ranks,
            placement=tuple(placement),
            max_tokens=self.max_tokens,
            hidden=self.hidden,
            top_k=self.top_k,
            payload=self.payload,
            reduction=Reduction.SOURCE,
            num_banks=NUM_BANKS,
            timeout_ns=timeout_ns,
        )

    def matches(self, max_tokens: int, hidden: int, num_experts: int) -> bool:
        """Whether it serves calls of these sizes, whatever their payload and top-k."""
        return (self.max_tokens, self.hidden, self.num_experts) == (max_tokens, hidden, num_experts)


def region_bytes(spec: ExchangeSpec) -> int:
    """Memory that one rank contributes to an exchange."""
    return int(_C.Layout(geometry_of(spec)).total)


class Arena:
    """One exchange, and the tensors that its zero-copy combines are written from."""

    def __init__(self, exchange: NativeExchange) -> None:
        self.exchange = exchange
        self._buffers: list[torch.Tensor | None] = [None] * NUM_BANKS
        self._turn = 0

    def next_turn(self) -> int:
        """Which combine buffer the next dispatch will use."""
        self._turn = (self._turn + 1) % NUM_BANKS
        return self._turn

    def combine_buffer(self, turn: int) -> torch.Tensor:
        """[E_local, R * max_tokens, H] bfloat16, for the experts' outputs of one dispatch in flight."""
        buffer = self._buffers[turn]
        if buffer is None:
            spec = self.exchange.spec
            shape = (len(spec.local_experts), spec.num_ranks * spec.max_tokens, spec.hidden)
            buffer = self._buffers[turn] = torch.empty(shape, dtype=torch.bfloat16)
        return buffer


class Arenas:
    """All exchanges of a Buffer.

    Args:
        group: torch.distributed process group of one host.
        shrink: a rank that passes a deadline is masked; else PeerTimeout is raised.
        timeout_ns: deadline of every wait.
        limit: bytes a rank may contribute to one exchange; 0 = no limit.
    """

    def __init__(self, group: Any, *, shrink: bool, timeout_ns: int, limit: int) -> None:
        self._group, self._shrink, self._timeout_ns, self._limit = group, shrink, timeout_ns, limit
        self._rank, self._num_ranks = group.rank(), group.size()
        self._arenas: dict[Sizes, Arena] = {}  # least recently used first
        self._masked: frozenset[int] = frozenset()

    def get(self, sizes: Sizes) -> Arena:
        """The arena of these sizes; collective where it does not exist yet.

        Raises: InvalidArgument for sizes that no exchange has, or while ranks are masked; StartupError.
        """
        masked = self.masked
        arena = self._arenas.pop(sizes, None)
        if arena is None:
            arena = self._create(sizes, masked)
        self._arenas[sizes] = arena
        if arena.exchange.masked != masked:
            arena.exchange.mask(masked - arena.exchange.masked)
        return arena

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that any arena has masked, by a deadline or on request."""
        return self._masked.union(*(arena.exchange.masked for arena in self._arenas.values()))

    def mask(self, rank: int) -> None:
        """Stops talking to a rank, in every arena. Local."""
        for arena in self._arenas.values():
            arena.exchange.mask([rank])
        self._masked |= {rank}

    def reset(self, dead: frozenset[int]) -> None:
        """Starts a new generation of every arena with only `dead` masked. Collective among the others."""
        for arena in self._arenas.values():
            arena.exchange.reset(dead)
        self._masked = dead

    def keep(self, max_tokens: int, hidden: int, num_experts: int) -> None:
        """Closes the arenas of other sizes. All ranks keep the same ones."""
        for sizes in [s for s in self._arenas if not s.matches(max_tokens, hidden, num_experts)]:
            self._arenas.pop(sizes).exchange.close()

    def close(self) -> None:
        """Frees every segment; idempotent."""
        for arena in self._arenas.values():
            arena.exchange.close()
        self._arenas.clear()

    def __iter__(self) -> Iterator[Arena]:
        return iter(self._arenas.values())

    def _create(self, sizes: Sizes, masked: frozenset[int]) -> Arena:
        if masked:
            allowed = f"sizes used before ranks {sorted(masked)} were masked: new memory needs every rank"
            raise InvalidArgument("sizes", sizes, allowed)
        spec = sizes.spec(self._rank, self._num_ranks, self._timeout_ns)
        try:
            needed = region_bytes(spec)
        except ConfigError as error:
            raise InvalidArgument(error.field, error.value, error.allowed) from error
        if 0 < self._limit < needed:
            raise InvalidArgument("num_rdma_bytes", self._limit, f"at least {needed} for {sizes}")
        while len(self._arenas) >= MAX_ARENAS:
            self._arenas.pop(next(iter(self._arenas))).exchange.close()
        on_timeout = "mask" if self._shrink else "raise"
        return Arena(bootstrap.from_process_group(self._group, spec, on_timeout=on_timeout))
