"""The paged KV cache of one rank: one pair of tensors per layer, addressed by block id.

The scheduler decides who owns which block. On a host, the system commits pages when blocks are first written,
so a large cache costs neither start-up time nor memory before its use. Units: blocks, tokens, bytes.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch

from ep_server.models.families.spec import GqaSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class KvLayer:
    """K and V of one layer.

    k: [blocks, block_size, kv_heads, k_dim]. v: [blocks, block_size, kv_heads, v_dim], or None where the
    first v_dim channels of k are the values (latent attention: kv_heads 1, k_dim kv_lora + rope_dim).
    """

    k: torch.Tensor
    v: torch.Tensor | None
    v_dim: int

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Stores tokens: slots: [T] int64 = block * block_size + offset; k, v: [T, kv_heads, dim]."""
        self.k.flatten(0, 1).index_copy_(0, slots, k)
        if self.v is not None and v is not None:
            self.v.flatten(0, 1).index_copy_(0, slots, v)


class LayerProgress:
    """How many layers of a step have written their keys and values. The thread of the steps counts.

    layers: any thread may read it. It grows during a step, and is 0 before the next one is planned.
    """

    def __init__(self) -> None:
        self.layers = 0
        self._micro_batches, self._written = 1, 0

    def begin(self, micro_batches: int = 1) -> None:
        """A step begins, or is about to."""
        self.layers, self._micro_batches, self._written = 0, micro_batches, 0

    def written(self, layer: int) -> None:
        """A micro-batch has written this layer. They take turns: no one is a whole layer ahead."""
        self._written += 1
        if self._written % self._micro_batches == 0:
            self.layers = layer + 1


class KvCache:
    """All layers. `blocks` counts usable blocks, ids 0 .. blocks - 1."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.progress = LayerProgress()
        device = device or torch.device("cpu")
        self.layers = tuple(_layer(spec, blocks, block_size, dtype, device) for _ in range(spec.num_layers))

    @property
    def nbytes(self) -> int:
        """Address space of the cache, bytes."""
        return sum(x.k.nbytes + (0 if x.v is None else x.v.nbytes) for x in self.layers)

    def parts(self) -> list[torch.Tensor]:
        """The memory of K and V of every layer, as [blocks, bytes] uint8; all of one size."""
        tensors = (tensor for layer in self.layers for tensor in (layer.k, layer.v) if tensor is not None)
        return [tensor.view(self.blocks, -1).view(torch.uint8) for tensor in tensors]


def _layer(
    spec: ModelSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KvLayer:
    a = spec.attention
    if isinstance(a, GqaSpec):
        shape = (blocks, block_size, a.kv_heads, a.head_dim)
        return KvLayer(zeros(shape, dtype, device), zeros(shape, dtype, device), a.head_dim)
    latent = zeros((blocks, block_size, 1, a.kv_lora + a.rope_dim), dtype, device)
    return KvLayer(latent, None, a.kv_lora)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a host in a mapping of their own, since torch.zeros would write every page."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
