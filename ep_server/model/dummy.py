"""Random weights in place of a checkpoint's, for benchmarks of a shape: a config.json is all there is.

A tensor depends on its name, its shape and the seed and on nothing else, so ranks agree on what they share
and an expert is the same whoever owns it. Knows no files and no ranks.
"""

from __future__ import annotations

import hashlib
import math

import torch

from ep_server.model.families.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
UNIFORM_SPREAD = math.sqrt(3.0)  # half the width of a uniform distribution of deviation 1


class DummyReader:
    """See `tensors.TensorSource`. Matrices keep the variance of what they multiply; norms are 1, biases 0.

    Uniform and not normal: these are integer draws and one product, the same bits on every kind of CPU.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._seed = seed
        # As a head it multiplies hidden states; as an embedding alone it is what norms scale to 1.
        self._embedding_deviation = spec.hidden**-0.5 if spec.tied_head else 1.0

    def has(self, name: str) -> bool:
        """Nothing is there before it is read: the loader then takes the first layout it knows."""
        return False

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> torch.Tensor:
        """The tensor of that name, float32; or entry `part` of its first dimension."""
        if part is not None:
            return self.read(f"{name}[{part}]", shape[1:])
        if len(shape) == 1:
            return torch.ones(shape) if name.endswith(".weight") else torch.zeros(shape)
        deviation = self._embedding_deviation if name == EMBEDDING else shape[-1] ** -0.5
        edge = deviation * UNIFORM_SPREAD
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.empty(shape).uniform_(-edge, edge, generator=generator)
