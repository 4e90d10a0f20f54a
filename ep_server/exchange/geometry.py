"""Checks an ExchangeSpec (limits.py) and turns it into the native geometry.

Sizes and offsets come from csrc/exchange/common/layout.hpp through `_C.Layout`; nothing here computes one.
"""

from __future__ import annotations

import hashlib

from ep_server import _C
from ep_server.errors import ConfigError
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction
from ep_server.exchange.limits import MAX_GROUP_BYTES, check_spec

PAYLOADS = (Payload.FP32, Payload.BF16, Payload.FP8, Payload.FP8_POW2, Payload.FP8_UE8M0)
REDUCTIONS = (Reduction.RANK, Reduction.SOURCE)
FP8 = frozenset({Payload.FP8, Payload.FP8_POW2, Payload.FP8_UE8M0})


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
