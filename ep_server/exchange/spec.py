"""The spec of an exchange: what all ranks agree on, its limits, its native geometry; and how long ranks wait.

Needs no torch. Sizes and offsets come from csrc/exchange/common/layout.hpp through `_C.Layout`; nothing here
computes one.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import TypedDict

from ep_server import _C
from ep_server.errors import ConfigError

MAX_RANKS = 64  # masks of ranks are one 64-bit word
MAX_BANKS = 16
MAX_TOP_K = 16  # GPU kernels keep a token's choices in fixed shared arrays (nvlink/weighted_sum.cuh)
MAX_TOKENS = 1 << 24  # a header cell has 31 bits for the count; the rest is memory
MAX_HIDDEN = 1 << 20
MAX_ENTRIES = 1 << 31  # rows that one rank may receive for its experts: 32 bits number them
MAX_GROUP_BYTES = 1 << 62  # a file's size is a signed 64-bit number
RECORD_BYTES = 64  # of a vote
DEFAULT_SPIN_US = 50


class Payload(StrEnum):
    """What a dispatched row looks like on the wire."""

    FP32 = "fp32"  # CPU only
    BF16 = "bf16"
    FP8 = "fp8"  # e4m3, one float32 scale per 128 channels
    FP8_POW2 = "fp8_pow2"  # scales rounded up to a power of two
    FP8_UE8M0 = "fp8_ue8m0"  # power-of-two scales, 4 exponents packed into one int32; H % 512 == 0


class Reduction(StrEnum):
    """Where the K expert outputs of a token are summed (always FP32, in top-k order)."""

    RANK = "rank"  # each rank sums its own experts' outputs, weighted, and returns one row per token
    SOURCE = "source"  # one row per (token, k) returns; the source sums: bit-identical for every R


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """Everything that all ranks must agree on. Only `rank` differs.

    placement: [E] owner rank of each physical expert, any table with values in 0 .. R-1.
    combine rows travel as float32 where payload is FP32, as bfloat16 otherwise.
    timeout_ns: deadline of every wait. num_banks: a power of two >= 2.
    """

    rank: int
    num_ranks: int
    placement: tuple[int, ...]
    max_tokens: int
    hidden: int
    top_k: int
    payload: Payload = Payload.BF16
    reduction: Reduction = Reduction.RANK
    num_banks: int = 4
    timeout_ns: int = 10_000_000_000

    @property
    def num_experts(self) -> int:
        """E, over all ranks."""
        return len(self.placement)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts, ascending; their order is the local numbering."""
        return tuple(e for e, r in enumerate(self.placement) if r == self.rank)

    @property
    def local_only(self) -> bool:
        """Whether rows need not travel at all: one rank, and no rounding that the spec promises.

        FP8 rounds rows on the wire. Reduction source promises the same bits for any number of ranks.
        """
        plain = self.payload in (Payload.FP32, Payload.BF16)
        return self.num_ranks == 1 and plain and self.reduction is Reduction.RANK


def control_spec(spec: ExchangeSpec) -> ExchangeSpec:
    """Of the group that ranks with GPUs form in host memory, for votes, liveness and bootstrap; no rows."""
    return replace(
        spec,
        placement=tuple(range(spec.num_ranks)),
        max_tokens=1,
        hidden=1,
        top_k=1,
        payload=Payload.FP32,
        reduction=Reduction.RANK,
        num_banks=2,
    )


def check_spec(spec: ExchangeSpec) -> None:
    """Raises ConfigError for the first field that no exchange can carry."""
    _in_range("num_ranks", spec.num_ranks, 1, MAX_RANKS)
    _in_range("rank", spec.rank, 0, spec.num_ranks - 1)
    _in_range("max_tokens", spec.max_tokens, 1, MAX_TOKENS)
    _in_range("hidden", spec.hidden, 1, MAX_HIDDEN)
    _in_range("top_k", spec.top_k, 1, MAX_TOP_K)
    _in_range("num_banks", spec.num_banks, 2, MAX_BANKS)
    _in_range("timeout_ns", spec.timeout_ns, 1, 1 << 62)
    if spec.num_banks & (spec.num_banks - 1):
        raise ConfigError("num_banks", spec.num_banks, f"a power of two from 2 to {MAX_BANKS}")
    if spec.num_ranks * spec.max_tokens * spec.top_k > MAX_ENTRIES:
        most = MAX_ENTRIES // (spec.num_ranks * spec.top_k)
        allowed = f"at most {most}, where {spec.num_ranks} ranks send tokens with {spec.top_k} choices each"
        raise ConfigError("max_tokens", spec.max_tokens, allowed)
    if not spec.placement:
        raise ConfigError("placement", spec.placement, "at least one expert")
    for expert, owner in enumerate(spec.placement):
        _in_range(f"placement[{expert}]", owner, 0, spec.num_ranks - 1)
    multiple = hidden_multiple(spec.payload)
    if spec.hidden % multiple:
        raise ConfigError("hidden", spec.hidden, f"a multiple of {multiple} for payload {spec.payload}")


def hidden_multiple(payload: Payload) -> int:
    """What H must be a multiple of: channels per scale, and per int32 of packed scales."""
    return {Payload.FP32: 1, Payload.BF16: 1, Payload.FP8_UE8M0: 512}.get(payload, 128)


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(name, value, f"an integer from {low} to {high}")


PAYLOADS = (Payload.FP32, Payload.BF16, Payload.FP8, Payload.FP8_POW2, Payload.FP8_UE8M0)
REDUCTIONS = (Reduction.RANK, Reduction.SOURCE)
FP8 = frozenset({Payload.FP8, Payload.FP8_POW2, Payload.FP8_UE8M0})


def check_hosts(hosts: tuple[int, ...], spec: ExchangeSpec) -> None:
    """Raises ConfigError unless `hosts` has a number for every rank."""
    if len(hosts) != spec.num_ranks:
        raise ConfigError("hosts", hosts, f"one number per rank: {spec.num_ranks}")
    if not all(0 <= host < 1 << 16 for host in hosts):
        raise ConfigError("hosts", hosts, f"numbers from 0 to {(1 << 16) - 1}")


def ranks_of_host(hosts: tuple[int, ...], spec: ExchangeSpec) -> range:
    """The ranks of this rank's host. Raises ConfigError unless the ranks of each host are consecutive.

    Args:
        hosts: [R] number of each rank's host.
    """
    check_hosts(hosts, spec)
    if len(list(groupby(hosts))) != len(set(hosts)):
        raise ConfigError("hosts", hosts, "such that the ranks of a host follow one another")
    first = hosts.index(hosts[spec.rank])
    return range(first, first + hosts.count(hosts[spec.rank]))


def experts_of(spec: ExchangeSpec, ranks: range) -> tuple[int, ...]:
    """Global ids of the experts of these ranks, ascending: their order is the numbering inside the host."""
    return tuple(e for e, owner in enumerate(spec.placement) if owner in ranks)


def spec_of_host(spec: ExchangeSpec, ranks: range) -> ExchangeSpec:
    """The exchange of one host's ranks, counted from 0, with their experts alone.

    A spec needs an expert, so a host without experts gets one that receives no tokens.
    """
    owners = tuple(spec.placement[e] - ranks.start for e in experts_of(spec, ranks))
    return replace(spec, rank=spec.rank - ranks.start, num_ranks=len(ranks), placement=owners or (0,))


def geometry_of(spec: ExchangeSpec) -> _C.Geometry:
    """The native geometry of a valid spec.

    Raises: ConfigError naming the field, its value and what is allowed.
    """
    check_spec(spec)
    table = ",".join(map(str, spec.placement)).encode()
    geometry = _C.Geometry(
        num_ranks=spec.num_ranks,
        num_experts=spec.num_experts,
        max_tokens=spec.max_tokens,
        hidden=spec.hidden,
        top_k=spec.top_k,
        num_banks=spec.num_banks,
        payload=PAYLOADS.index(Payload(spec.payload)),
        reduction=REDUCTIONS.index(Reduction(spec.reduction)),
        placement_hash=int.from_bytes(hashlib.blake2b(table, digest_size=8).digest(), "little"),
    )
    # The limits keep one rank's region within 64 bits; the group's is multiplied here, where nothing wraps.
    needed = spec.num_ranks * _C.Layout(geometry).total
    if needed > MAX_GROUP_BYTES:
        allowed = f"less: {needed} bytes for all ranks are more than {MAX_GROUP_BYTES}"
        raise ConfigError("max_tokens", spec.max_tokens, allowed)
    return geometry


def group_bytes(spec: ExchangeSpec) -> int:
    """Memory of the whole group, bytes."""
    return _C.Layout(geometry_of(spec)).group_bytes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a GPU for the exchange of its rank, bytes.

    slots: for few rows. heap: for many. step: what a step of many rows takes for a time.
    """

    slots: int
    heap: int = 0
    step: int = 0

    @property
    def held(self) -> int:
        """As long as the exchange is open."""
        return self.slots + self.heap


def check_segment(spec: ExchangeSpec, segment: _C.Geometry) -> None:
    """Raises ConfigError for the first field in which a rank differs from the group's segment."""
    own = geometry_of(spec)
    for name in _FIELDS:
        if getattr(own, name) != getattr(segment, name):
            what = "placement" if name == "placement_hash" else name
            raise ConfigError(
                what, _shown(name, own), f"{_shown(name, segment)}, as in the segment of the group"
            )


_FIELDS = (
    "num_ranks",
    "num_experts",
    "max_tokens",
    "hidden",
    "top_k",
    "num_banks",
    "payload",
    "reduction",
    "placement_hash",
)


def _shown(name: str, geometry: _C.Geometry) -> object:
    value = getattr(geometry, name)
    if name == "payload":
        return str(PAYLOADS[value])
    return str(REDUCTIONS[value]) if name == "reduction" else value


class Timing(TypedDict):
    """Keywords of the native exchanges; durations in ns."""

    timeout_ns: int
    liveness_ns: int
    spin_ns: int
    mask_on_timeout: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long a rank waits. Raises ConfigError.

    spin_us: busy wait before yielding and sleeping; -1 = 0 where ranks outnumber usable cores, else 50.
    liveness_seconds: a barrier has no deadline, but ends if a peer's heartbeat stops for so long.
    on_timeout: "raise" aborts the group and raises PeerTimeout; "mask" continues without the peer.
    """

    spin_us: int = -1
    liveness_seconds: float = 30.0
    on_timeout: str = "raise"

    def __post_init__(self) -> None:
        if self.on_timeout not in {"raise", "mask"}:
            raise ConfigError("on_timeout", self.on_timeout, "one of raise, mask")
        if self.spin_us < -1:
            raise ConfigError("spin_us", self.spin_us, "at least -1")
        if self.liveness_seconds <= 0:
            raise ConfigError("liveness_seconds", self.liveness_seconds, "above 0")

    def native(self, spec: ExchangeSpec, ranks_here: int) -> Timing:
        """The same for csrc."""
        spin_us = self.spin_us
        if spin_us == -1:
            spin_us = DEFAULT_SPIN_US if ranks_here <= len(os.sched_getaffinity(0)) else 0
        return {
            "timeout_ns": spec.timeout_ns,
            "liveness_ns": int(self.liveness_seconds * 1e9),
            "spin_ns": spin_us * 1000,
            "mask_on_timeout": self.on_timeout == "mask",
        }
