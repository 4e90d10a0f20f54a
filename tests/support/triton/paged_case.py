"""Sequences in a paged cache whose every unused slot is NaN, and what attention over them must give."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.backends.gpu.kernels.triton.paged import PagedKv, Sequences
from ep_server.models.kv_cache import KvLayer
from tests.support.triton.harness import DEVICE, FP8, NAN, codes, random


@dataclass(frozen=True)
class Heads:
    """v_dim None: latent attention, values are the first `latent` channels of the keys."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int | None
    latent: int = 0


@dataclass
class PagedCase:
    """keys, values: per sequence [length, kv_heads, dim] in float64, as the cache's codes read."""

    kv: PagedKv
    sequences: Sequences
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: list[int]

    @staticmethod
    def of(lengths: list[int], heads: Heads, block_size: int, dtype: torch.dtype) -> PagedCase:
        """Blocks are dealt out of order; table entries past a sequence's end point far outside."""
        counts = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3)).tolist()
        table = torch.full((len(lengths), max(counts, default=0) + 3), 1 << 30, dtype=torch.int64)
        v_dim = heads.latent if heads.v_dim is None else heads.v_dim
        shape = (len(order), block_size, heads.kv_heads)
        k = torch.full((*shape, heads.k_dim), NAN, device=DEVICE).to(dtype)
        v = None if heads.v_dim is None else torch.full((*shape, v_dim), NAN, device=DEVICE).to(dtype)
        scales = [0.5 * random(heads.kv_heads, seed=s).abs() + 0.1 for s in (7, 8)] if dtype is FP8 else None
        kv = PagedKv(KvLayer(k, v, v_dim), *_used(scales, v is not None))
        case = PagedCase(
            kv,
            Sequences(table.to(DEVICE), torch.tensor(lengths, dtype=torch.int64, device=DEVICE)),
            [],
            [],
            lengths,
        )
        for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            mine, order = order[:count], order[count:]
            case.sequences.blocks[s, :count] = torch.tensor(mine)
            slots = torch.tensor(
                [mine[p // block_size] * block_size + p % block_size for p in range(length)],
                dtype=torch.int64,
            )
            case.keys.append(_fill(k, slots, None if scales is None else scales[0], 10 + s))
            case.values.append(
                case.keys[-1][..., :v_dim] if v is None else _fill(v, slots, scales and scales[1], 50 + s)
            )
        return case

    def attend(self, s: int, q: torch.Tensor, position: int, scale: float, window: int = 0) -> torch.Tensor:
        """q: [heads, k_dim] of the token at `position` of sequence s. Returns [heads, v_dim] in float64."""
        first = max(0, position + 1 - window) if window else 0
        k, v = (x[first : position + 1] for x in (self.keys[s], self.values[s]))
        group = len(q) // k.shape[1]
        rows = [
            torch.softmax(k[:, h // group] @ q[h].double() * scale, 0) @ v[:, h // group]
            for h in range(len(q))
        ]
        return torch.stack(rows)


def _used(scales: list[torch.Tensor] | None, both: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if scales is None else (scales[0], scales[1] if both else None)


def _fill(cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None, seed: int) -> torch.Tensor:
    """Writes random rows to the slots; returns what they read as."""
    rows = random(len(slots), *cache.shape[2:], seed=seed)
    if scale is None:
        rows = rows.to(cache.dtype)
        exact = rows.double()
    else:
        rows = codes(rows, scale[:, None])
        exact = rows.double() * scale[:, None].double()
    cache.flatten(0, 1)[slots.to(DEVICE)] = rows
    return exact
