"""The paged KV cache of one rank: one pair of tensors per layer, addressed by block id.

The scheduler decides who owns which block. On a host, the system commits pages when blocks are first written,
so a large cache costs neither start-up time nor memory before its use. Units: blocks, tokens, bytes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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


class StepProgress(Protocol):
    """How many layers of a step have written their keys and values."""

    def plan_step(self) -> int:
        """A step was planned and is launched next, if at all. Returns: its number."""
        ...

    def begin(self, micro_batches: int = 1) -> None:
        """The step planned last begins."""
        ...

    def written(self, layer: int) -> None:
        """A micro-batch of the step has written this layer."""
        ...

    def layers_of(self, step: int) -> int:
        """Leading layers that are written; all rows of earlier steps are then too. 0 if that is unknown.

        Any thread may ask.
        """
        ...


class LayerProgress:
    """Of steps that have ended when the next one is planned. The thread of the steps counts."""

    def __init__(self) -> None:
        self._step = 0
        self._at = 0, 0  # step, layers
        self._micro_batches, self._written = 1, 0

    def plan_step(self) -> int:
        """As StepProgress.plan_step."""
        self._step += 1
        self.begin()
        return self._step

    def begin(self, micro_batches: int = 1) -> None:
        """As StepProgress.begin."""
        self._at = self._step, 0
        self._micro_batches, self._written = micro_batches, 0

    def written(self, layer: int) -> None:
        """As StepProgress.written. Micro-batches take turns: no one is a whole layer ahead."""
        self._written += 1
        if self._written % self._micro_batches == 0:
            self._at = self._step, layer + 1

    def layers_of(self, step: int) -> int:
        """As StepProgress.layers_of."""
        current, layers = self._at
        return layers if current == step else 0


Zeros = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]


class KvCache:
    """All layers. `blocks` counts usable blocks, ids 0 .. blocks - 1."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        make: Zeros | None = None,
    ) -> None:
        """make: where its memory comes from; called for the parts in their order."""
        self.blocks, self.block_size = blocks, block_size
        self.progress: StepProgress = LayerProgress()
        device = device or torch.device("cpu")
        self.layers = tuple(
            _layer(spec, blocks, block_size, dtype, device, make or zeros) for _ in range(spec.num_layers)
        )

    @property
    def nbytes(self) -> int:
        """Address space of the cache, bytes."""
        return sum(x.k.nbytes + (0 if x.v is None else x.v.nbytes) for x in self.layers)

    def parts(self) -> list[torch.Tensor]:
        """The memory of K and V of every layer, as [blocks, bytes] uint8; all of one size."""
        tensors = (tensor for layer in self.layers for tensor in (layer.k, layer.v) if tensor is not None)
        return [tensor.view(self.blocks, -1).view(torch.uint8) for tensor in tensors]


def _layer(
    spec: ModelSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, make: Zeros
) -> KvLayer:
    a = spec.attention
    if isinstance(a, GqaSpec):
        shape = (blocks, block_size, a.kv_heads, a.head_dim)
        return KvLayer(make(shape, dtype, device), make(shape, dtype, device), a.head_dim)
    latent = make((blocks, block_size, 1, a.kv_lora + a.rope_dim), dtype, device)
    return KvLayer(latent, None, a.kv_lora)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a host in a mapping of their own, since torch.zeros would write every page."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
