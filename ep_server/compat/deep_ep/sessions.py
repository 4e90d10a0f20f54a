"""The sessions of a Buffer: one for each combination of sizes that its calls have used.

The first call of new sizes makes the session, collectively: all ranks make the same calls in the same order.
This module owns the sessions' lifetime and keeps their masks equal. Units: bytes, ns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ep_server import _C
from ep_server.compat.deep_ep.bootstrap import Network, bulk_from_process_group, from_process_group
from ep_server.compat.deep_ep.events import HostStreams, Streams, capturing
from ep_server.compat.deep_ep.normal import NormalSession
from ep_server.compat.deep_ep.session import BufferSession
from ep_server.errors import ConfigError, InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction
from ep_server.exchange.spec import MAX_RANKS, MAX_TOP_K, Waiting, geometry_of
from ep_server.exchange.validate import CPU, check_tensor

NUM_BANKS = 4  # operations in flight: two micro-batches, and the next operation of each
MAX_EXPERTS = 1 << 16  # far more than any model has; tables grow with it
MAX_SECONDS = 1e9
MAX_SESSIONS = 8  # the least recently used is closed beyond it


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a session. Ranks own contiguous blocks of experts, as equal as possible."""

    max_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    payload: Payload
    device: torch.device = CPU

    def spec(self, rank: int, num_ranks: int, timeout_ns: int) -> ExchangeSpec:
        """The exchange of these sizes. On CPUs its reduction is SOURCE, which has room for both reductions.

        Raises: ConfigError for an unsupported number of experts or ranks.
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
        """Sorts sizes in the same order on all ranks."""
        device = self.device.type  # the number differs between ranks
        return self.max_tokens, self.hidden, self.top_k, self.num_experts, str(self.payload), device

    def matches(self, max_tokens: int, hidden: int, num_experts: int) -> bool:
        """Whether it serves calls of these sizes with any payload, top-k and device."""
        return (self.max_tokens, self.hidden, self.num_experts) == (max_tokens, hidden, num_experts)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of all sessions of a Buffer.

    shrink: mask a rank that misses a deadline instead of raising PeerTimeout. timeout_ns: deadline of every
    wait. limit: bytes a rank may contribute to one exchange; 0 = no limit. num_sms: multiprocessors that a
    kernel may fill; 0 = all; GPUs only. heap_bytes: memory for rows of high-throughput calls; GPUs only.
    network: of high-throughput calls between hosts.
    """

    shrink: bool
    timeout_ns: int
    limit: int
    num_sms: int
    heap_bytes: int
    network: Network

    @classmethod
    def checked(
        cls,
        *,
        shrink: bool,
        timeout_seconds: float,
        limit: int,
        num_sms: int,
        heap_bytes: int,
        network: Network,
    ) -> Options:
        """Of the arguments of a Buffer. Raises InvalidArgument."""
        if not isinstance(timeout_seconds, int | float) or not 1e-9 <= timeout_seconds <= MAX_SECONDS:
            raise InvalidArgument("timeout_seconds", timeout_seconds, f"from 1e-9 to {MAX_SECONDS:g}")
        for name, value in (
            ("low_latency_num_sms", num_sms),
            ("num_rdma_bytes", limit),
            ("num_nvl_bytes", heap_bytes),
        ):
            if not isinstance(value, int) or value < 0:
                raise InvalidArgument(name, value, "an integer, at least 0")
        if not isinstance(network, Network):
            raise InvalidArgument("network", network, "a Network or None")
        return cls(shrink, int(timeout_seconds * 1e9), limit, num_sms, heap_bytes, network)


def region_bytes(spec: ExchangeSpec) -> int:
    """Memory that one rank contributes to an exchange."""
    return int(_C.Layout(geometry_of(spec)).total)


def size_hint(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes per rank that suffice for low-latency calls of these sizes with any top-k and payload."""
    sizes = Sizes(max_tokens, hidden, min(MAX_TOP_K, num_experts), num_experts, Payload.BF16)
    return region_bytes(sizes.spec(0, num_ranks, 1))


class Sessions:
    """All sessions of a Buffer, over one torch.distributed process group."""

    def __init__(self, group: Any, options: Options) -> None:
        self._group, self._options = group, options
        self._rank, self._num_ranks = group.rank(), group.size()
        self._sessions: dict[Sizes, BufferSession] = {}  # least recently used first
        self._streams: dict[torch.device, Streams | HostStreams] = {}
        self._masked: frozenset[int] = frozenset()
        self._normal: dict[str, NormalSession] = {}  # by the type of device
        self._closed = False

    def get(self, sizes: Sizes) -> BufferSession:
        """The session of these sizes. Collective if it does not exist yet.

        Raises: InvalidArgument for unsupported sizes, new sizes while ranks are masked, or new sizes inside a
          graph; StartupError.
        """
        self._check_open()
        session = self._sessions.pop(sizes, None)
        if session is None:
            session = self._create(sizes)
        self._sessions[sizes] = session
        masked = self._known_masked()
        if session.known_masked != masked:
            session.mask(masked - session.known_masked)
        return session

    def normal(self, device: torch.device) -> NormalSession:
        """The session of high-throughput calls on this device. Collective if it does not exist yet.

        Raises: InvalidArgument without num_nvl_bytes on a GPU; StartupError.
        """
        self._check_open()
        session = self._normal.get(device.type)
        if session is None:
            if device != CPU and self._options.heap_bytes <= 0:
                raise InvalidArgument("num_nvl_bytes", self._options.heap_bytes, "memory for received rows")
            options = self._options
            try:
                exchange = bulk_from_process_group(
                    self._group, device, options.timeout_ns, options.heap_bytes, options.network
                )
            except ConfigError as error:
                raise InvalidArgument(error.field, error.value, error.allowed) from error
            session = NormalSession(exchange, self._rank, self._num_ranks, self.streams(device))
            self._normal[device.type] = session
        return session

    def masked(self) -> frozenset[int]:
        """Ranks that any session has masked, by a deadline or on request. Masks them in all sessions."""
        self._check_open()
        masked = self._masked.union(*(session.masked() for session in self))
        for rank in masked - self._masked:
            self.mask(rank)
        return masked

    def fill_masked(self, status: torch.Tensor) -> None:
        """Writes 1 for masked ranks, else 0, to [R] int32. Raises InvalidArgument for another tensor."""
        device, masked = status.device, self.masked()
        check_tensor("mask_status", status, device, torch.int32, R=self._num_ranks)
        found = [int(rank in masked) for rank in range(self._num_ranks)]
        status.copy_(torch.tensor(found, dtype=torch.int32, device=device))

    def mask(self, rank: int) -> None:
        """Stops communicating with a rank, in every session. Local."""
        self._check_open()
        for session in self:
            if rank not in session.known_masked:
                session.mask([rank])
        self._masked |= {rank}

    def reset(self, dead: frozenset[int]) -> None:
        """Starts a new generation of every session with only `dead` masked. Collective among the others."""
        self._check_open()
        # A masked rank has not made the calls of the others, so its order of use differs.
        self._sessions = {sizes: self._sessions[sizes] for sizes in sorted(self._sessions, key=Sizes.key)}
        for session in self:
            session.reset(dead)
        if not dead:  # high-throughput calls need every rank
            for device in sorted(self._normal):
                self._normal[device].reset()
        self._masked = dead

    def keep(self, max_tokens: int, hidden: int, num_experts: int) -> None:
        """Closes sessions of other sizes, except those that graphs use. All ranks keep the same ones."""
        for sizes in [s for s in self._sessions if not s.matches(max_tokens, hidden, num_experts)]:
            if not self._sessions[sizes].pinned:
                self._sessions.pop(sizes).close()

    def streams(self, device: torch.device) -> Streams | HostStreams:
        """The streams of calls on this device."""
        if device not in self._streams:
            self._streams[device] = HostStreams() if device == CPU else Streams(device)
        return self._streams[device]

    def close(self) -> None:
        """Frees all memory; idempotent. Later calls raise InvalidArgument."""
        self._closed = True
        for session in self:
            session.close()
        self._sessions.clear()
        for normal in self._normal.values():
            normal.close()
        self._normal.clear()

    def __iter__(self) -> Iterator[BufferSession]:
        return iter(self._sessions.values())

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("buffer", "destroyed", "one that is not")

    def _known_masked(self) -> frozenset[int]:
        return self._masked.union(*(session.known_masked for session in self))

    def _create(self, sizes: Sizes) -> BufferSession:
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

    def _make(self, sizes: Sizes) -> BufferSession:
        spec = sizes.spec(self._rank, self._num_ranks, self._options.timeout_ns)
        needed = region_bytes(spec)
        if 0 < self._options.limit < needed:
            raise InvalidArgument("num_rdma_bytes", self._options.limit, f"at least {needed} for {sizes}")
        while len(self._sessions) >= MAX_SESSIONS:
            self._close_oldest()
        waiting = Waiting(on_timeout="mask" if self._options.shrink else "raise")
        exchange = from_process_group(self._group, spec, sizes.device, waiting, self._options.num_sms)
        return BufferSession(exchange, sizes.device, self.streams(sizes.device))

    def _close_oldest(self) -> None:
        for sizes, session in self._sessions.items():
            if not session.pinned:
                self._sessions.pop(sizes).close()
                return
        raise InvalidArgument(
            "sizes", len(self._sessions) + 1, f"at most {MAX_SESSIONS}, all in use by graphs"
        )


def payload_of(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Payload:
    """The payload that the three flags of low_latency_dispatch name."""
    if use_ue8m0 and not round_scale:
        raise InvalidArgument("use_ue8m0", True, "given together with round_scale=True")
    if not use_fp8:
        return Payload.BF16
    if use_ue8m0:
        return Payload.FP8_UE8M0
    return Payload.FP8_POW2 if round_scale else Payload.FP8
