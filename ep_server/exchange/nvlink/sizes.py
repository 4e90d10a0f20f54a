"""Memory of a GPU for the exchange over NVLink, before there is one. Pure; bytes.

Beside the slots for few rows, a region may have a heap for many: a block where rows come in, and one where
they return.
"""

from __future__ import annotations

from ep_server import _C
from ep_server.exchange.spec import FP8, DeviceMemory, ExchangeSpec, Reduction, geometry_of, hidden_multiple

BF16_BYTES = 2
ACCESS = 16  # bytes that a GPU moves at once
PAGE = 2 << 20  # a region is mapped in whole pages


def has_normal(spec: ExchangeSpec) -> bool:
    """Whether many rows can travel so: they are summed at the experts' ranks, and fill whole accesses."""
    aligned = _row_bytes(spec) % ACCESS == 0 and spec.hidden * BF16_BYTES % ACCESS == 0
    fits = spec.max_tokens <= _C.BULK_MAX_ROWS and most_experts(spec) <= _C.BULK_MAX_LOCAL_EXPERTS
    return spec.num_ranks > 1 and spec.reduction is Reduction.RANK and aligned and fits


def most_experts(spec: ExchangeSpec) -> int:
    """The most experts of a rank."""
    return max(spec.placement.count(rank) for rank in range(spec.num_ranks))


def landing(spec: ExchangeSpec) -> tuple[int, ...]:
    """Of the block where rows come in: offsets of scales, ids, weights and the end; its size."""
    return _C.bulk_block(
        rows=spec.num_ranks * spec.max_tokens,
        row_bytes=_row_bytes(spec),
        scale_words=spec.hidden // hidden_multiple(spec.payload) if spec.payload in FP8 else 0,
        top_k=spec.top_k,
        with_ids=True,
    )


def heap_bytes(spec: ExchangeSpec) -> int:
    """Both blocks."""
    returning = (spec.num_ranks - 1) * spec.max_tokens
    return landing(spec)[-1] + _C.bulk_block(rows=returning, row_bytes=spec.hidden * BF16_BYTES)[-1]


def device_memory(spec: ExchangeSpec, *, many: bool) -> DeviceMemory:
    """many: also for many rows at once, where the spec allows. Raises: ConfigError."""
    geometry = geometry_of(spec)
    slots = _whole(_C.device_region(geometry))
    if not (many and has_normal(spec)):
        return DeviceMemory(slots)
    heap = _whole(_C.device_region(geometry, heap_bytes(spec))) - slots
    rows, choices = spec.num_ranks * spec.max_tokens, min(spec.top_k, most_experts(spec))
    sums, sent = rows * spec.hidden * BF16_BYTES, spec.max_tokens * _row_bytes(spec)
    return DeviceMemory(slots, heap, sums + sent + rows * (8 * choices + 4 * spec.top_k))


def _whole(region: int) -> int:
    return -(-region // PAGE) * PAGE


def _row_bytes(spec: ExchangeSpec) -> int:
    return spec.hidden * (1 if spec.payload in FP8 else BF16_BYTES)
