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
from ep_server.compat.deep_ep.operation import Arena
from ep_server.compat.deep_ep.session_cpu import NativeArena
from ep_server.compat.deep_ep.streams import Streams, capturing
from ep_server.errors import ConfigError, InvalidArgument, StartupError
from ep_server.exchange import bootstrap
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction
from ep_server.exchange.geometry import geometry_of
from ep_server.exchange.limits import MAX_RANKS
from ep_server.exchange.nvlink import bootstrap as cuda_bootstrap
from ep_server.exchange.tensors import CPU

NUM_BANKS = 4  # operations in flight: two micro-batches and the next one of each
MAX_EXPERTS = 1 << 16  # of a Buffer's calls: far more than any model has; tables grow with them
MAX_ARENAS = 8  # the least recently used is closed beyond it


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an exchange is made for. Experts lie on the ranks in contiguous blocks as equal as can be."""

    max_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    payload: Payload
    device: torch.device = CPU

    def spec(self, rank: int, num_ranks: int, timeout_ns: int) -> ExchangeSpec:
        """The exchange of these sizes; on CPUs SOURCE, which has room for both reductions.

        Raises: ConfigError for numbers of experts or ranks that no Buffer has.
        """
        for name, value, most in (
            ("num_experts", self.num_experts, MAX_EXPERTS),
            ("num_ranks", num_ranks, MAX_RANKS),
        ):
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(name, value, f"an integer from 1 to {most}")
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
            reduction=Reduction.SOURCE if self.device == CPU else Reduction.RANK,
            num_banks=NUM_BANKS,
            timeout_ns=timeout_ns,
        )

    def key(self) -> tuple[int | str, ...]:
        """Brings sizes into an order that is the same on all ranks."""
        device = self.device.type  # its number is another one on each rank
        return self.max_tokens, self.hidden, self.top_k, self.num_experts, str(self.payload), device

    def matches(self, max_tokens: int, hidden: int, num_experts: int) -> bool:
        """Whether it serves calls of these sizes, whatever their payload, top-k and device."""
        return (self.max_tokens, self.hidden, self.num_experts) == (max_tokens, hidden, num_experts)


@dataclass(frozen=True, slots=True)
class Options:
    """What all exchanges of a Buffer have in common.

    shrink: a rank that passes a deadline is masked; else PeerTimeout is raised. timeout_ns: deadline of every
    wait. limit: bytes a rank may contribute to one exchange; 0 = no limit. num_sms: multiprocessors that a
    kernel may fill; 0 = all; GPUs only.
    """

    shrink: bool
    timeout_ns: int
    limit: int
    num_sms: int


def region_bytes(spec: ExchangeSpec) -> int:
    """Memory that one rank contributes to an exchange."""
    return int(_C.Layout(geometry_of(spec)).total)


class Arenas:
    """All exchanges of a Buffer over one torch.distributed process group of one host."""

    def __init__(self, group: Any, options: Options) -> None:
        self._group, self._options = group, options
        self._rank, self._num_ranks = group.rank(), group.size()
        self._arenas: dict[Sizes, Arena] = {}  # least recently used first
        self._streams: dict[torch.device, Streams] = {}
        self._masked: frozenset[int] = frozenset()
        self._closed = False

    def get(self, sizes: Sizes) -> Arena:
        """The arena of these sizes; collective where it does not exist yet.

        Raises: InvalidArgument for sizes that no exchange has, while ranks are masked, or for the first call
          of its sizes inside a graph; StartupError.
        """
        self._check_open()
        arena = self._arenas.pop(sizes, None)
        if arena is None:
            arena = self._create(sizes)
        self._arenas[sizes] = arena
        masked = self._known_masked()
        if arena.known_masked != masked:
            arena.mask(masked - arena.known_masked)
        return arena

    def masked(self) -> frozenset[int]:
        """Ranks that any arena has masked, by a deadline or on request; now masked in all of them."""
        self._check_open()
        masked = self._masked.union(*(arena.masked() for arena in self))
        for rank in masked - self._masked:
            self.mask(rank)
        return masked

    def mask(self, rank: int) -> None:
        """Stops talking to a rank, in every arena. Local."""
        self._check_open()
        for arena in self:
            if rank not in arena.known_masked:
                arena.mask([rank])
        self._masked |= {rank}

    def reset(self, dead: frozenset[int]) -> None:
        """Starts a new generation of every arena with only `dead` masked. Collective among the others."""
        self._check_open()
        # A rank that was masked has not made the calls of the others: it knows another order of use.
        self._arenas = {sizes: self._arenas[sizes] for sizes in sorted(self._arenas, key=Sizes.key)}
        for arena in self:
            arena.reset(dead)
        self._masked = dead

    def keep(self, max_tokens: int, hidden: int, num_experts: int) -> None:
        """Closes the arenas of other sizes but for those that graphs use. All ranks keep the same ones."""
        for sizes in [s for s in self._arenas if not s.matches(max_tokens, hidden, num_experts)]:
            if not self._arenas[sizes].pinned:
                self._arenas.pop(sizes).close()

    def streams(self, device: torch.device) -> Streams:
        """The streams of calls on this GPU."""
        if device not in self._streams:
            self._streams[device] = Streams(device)
        return self._streams[device]

    def close(self) -> None:
        """Frees all memory; idempotent. No call after it makes new memory."""
        self._closed = True
        for arena in self:
            arena.close()
        self._arenas.clear()

    def __iter__(self) -> Iterator[Arena]:
        return iter(self._arenas.values())

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("buffer", "destroyed", "one that is not")

    def _known_masked(self) -> frozenset[int]:
        return self._masked.union(*(arena.known_masked for arena in self))

    def _create(self, sizes: Sizes) -> Arena:
        if sizes.device.type not in {"cpu", "cuda"}:
            raise InvalidArgument("x", f"on {sizes.device}", "on a CPU or a CUDA device")
        if sizes.device != CPU and capturing():
            raise InvalidArgument("sizes", sizes, "used in a call outside of a graph first: it takes memory")
        if masked := self.masked():
            allowed = f"sizes used before ranks {sorted(masked)} were masked: new memory needs every rank"
            raise InvalidArgument("sizes", sizes, allowed)
        try:
            return self._make(sizes)
        except ConfigError as error:
            raise InvalidArgument(error.field, error.value, error.allowed) from error

    def _make(self, sizes: Sizes) -> Arena:
        spec = sizes.spec(self._rank, self._num_ranks, self._options.timeout_ns)
        needed = region_bytes(spec)
        if 0 < self._options.limit < needed:
            raise InvalidArgument("num_rdma_bytes", self._options.limit, f"at least {needed} for {sizes}")
        while len(self._arenas) >= MAX_ARENAS:
            self._close_oldest()
        return self._cuda(sizes.device, spec) if sizes.device != CPU else self._native(spec)

    def _close_oldest(self) -> None:
        for sizes, arena in self._arenas.items():
            if not arena.pinned:
                self._arenas.pop(sizes).close()
                return
        raise InvalidArgument("sizes", len(self._arenas) + 1, f"at most {MAX_ARENAS}, all in use by graphs")

    @property
    def _on_timeout(self) -> str:
        return "mask" if self._options.shrink else "raise"

    def _native(self, spec: ExchangeSpec) -> Arena:
        return NativeArena(bootstrap.from_process_group(self._group, spec, on_timeout=self._on_timeout))

    def _cuda(self, device: torch.device, spec: ExchangeSpec) -> Arena:
        try:
            from ep_server.compat.deep_ep.session_cuda import CudaArena

            with torch.cuda.device(device):
                exchange = cuda_bootstrap.from_process_group(
                    self._group,
                    spec,
                    device=device.index,
                    on_timeout=self._on_timeout,
                    num_sms=self._options.num_sms,
                )
        except ImportError as error:
            raise StartupError(f"this installation was built without CUDA: {error}") from error
        return CudaArena(exchange, self.streams(device))
