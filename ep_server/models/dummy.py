"""Random weights in place of a checkpoint's, for benchmarks that have only a config.json.

A tensor depends on its name, its shape and the seed only. So ranks agree on what they share, and an expert is
the same on every rank. Tensors are made on the device that needs them.
"""

from __future__ import annotations

import hashlib
import math

import torch

from ep_server.exchange.quant import E4M3_MAX
from ep_server.models.families.spec import EMBEDDING, ModelSpec
from ep_server.models.loading import Codes, widen

UNIFORM_SPREAD = math.sqrt(3.0)  # half the width of a uniform distribution of deviation 1
CPU_ELEMENTS, DEVICE_ELEMENTS = 1 << 16, 1 << 24  # drawn at once: what a cache holds, what fills a GPU


class DummyReader:
    """See `tensors.TensorSource`. Matrices keep the variance of what they multiply; norms are 1, biases 0.

    Experts of a model with FP8 weights are codes, with one scale for all blocks.

    Uniform and not normal: these are integer draws and one product, the same bits on every kind of CPU.
    """

    def __init__(self, spec: ModelSpec, seed: int, device: torch.device | None = None) -> None:
        self._seed, self._device, self._block = seed, device or torch.device("cpu"), spec.quant_block
        # As a head it multiplies hidden states; as an embedding alone it is what norms scale to 1.
        self._embedding_deviation = spec.hidden**-0.5 if spec.tied_head else 1.0

    def has(self, name: str) -> bool:
        """Nothing is there before it is read: the loader then takes the first layout it knows."""
        return False

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> torch.Tensor:
        """The tensor of that name, float32 holding bfloat16 values; or entry `part` of its first axis."""
        if part is not None:
            return self.read(f"{name}[{part}]", shape[1:])
        if self.is_fp8(name) and self._block is not None:
            return widen(*self._codes(name, shape, self._block), self._block)
        return self._values(name, shape)

    def copy(self, into: torch.Tensor, name: str, shape: tuple[int, ...], part: int | None = None) -> None:
        """See TensorSource."""
        into.copy_(self.read(name, shape, part))

    def is_fp8(self, name: str) -> bool:
        """Those of experts, where the model's weights are FP8."""
        return self._block is not None and ".experts." in name

    def copy_codes(self, into: Codes, name: str, shape: tuple[int, ...], part: int | None = None) -> None:
        """See TensorSource."""
        assert self._block is not None
        one = (name, shape) if part is None else (f"{name}[{part}]", shape[1:])
        for memory, values in zip(into, self._codes(*one, self._block), strict=True):
            memory.copy_(values)

    def flush(self) -> None:
        """Nothing: values are there when copy() returns."""

    def read_vector(self, name: str, lengths: tuple[int, ...]) -> torch.Tensor | None:
        """None: nothing is there before it is read."""
        return None

    def _codes(self, name: str, shape: tuple[int, ...], block: tuple[int, int]) -> Codes:
        """The codes nearest to random values. The scale is a power of two: bfloat16 holds the products."""
        scale = 2.0 ** math.ceil(math.log2(shape[-1] ** -0.5 * UNIFORM_SPREAD / E4M3_MAX))
        grid = [-(-length // size) for length, size in zip(shape, block, strict=True)]
        codes = (self._values(name, shape) / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return Codes(codes, torch.full(grid, scale, device=self._device))

    def _values(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            fill = torch.ones if name.endswith(".weight") else torch.zeros
            return fill(shape, device=self._device)
        deviation = self._embedding_deviation if name == EMBEDDING else shape[-1] ** -0.5
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little", signed=True)
        drawn = draw(math.prod(shape), seed, deviation * UNIFORM_SPREAD, self._device)
        return drawn.bfloat16().float().view(shape)


def draw(count: int, seed: int, edge: float, device: torch.device) -> torch.Tensor:
    """[count] float32, uniform between -edge and edge; element i depends on i and the seed alone.

    Args:
        count: below 2^31. seed: 32 bits, signed.
    """
    size = min(count, CPU_ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS)
    steps = torch.arange(size, dtype=torch.int32, device=device) * _signed(0x9E3779B9)
    drawn = torch.empty(count, device=device)
    for at in range(0, count, size):
        x = (steps[: count - at] + _signed(at * 0x9E3779B9)) ^ seed
        x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(0x85EBCA6B)
        x = (x ^ ((x >> 13) & 0x7FFFF)) * _signed(0xC2B2AE35)
        x = x ^ ((x >> 16) & 0xFFFF)
        torch.mul(x, edge / 2**31, out=drawn[at : at + size])
    return drawn


def _signed(number: int) -> int:
    """The lowest 32 bits as a signed number: arithmetic of int32 tensors wraps around."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
