"""[7] Expert ids drawn at random instead of chosen: any set of K experts is as likely as any other.

For benchmarks of a shape whose weights are random, so that a router's habits do not decide what is measured.
A draw depends on seed, request number, position and layer alone: not on ranks, batches, chunks or
micro-batches. Integer operations on tensors only; nothing waits for the host.
"""

from __future__ import annotations

import torch

from ep_server.models.families.spec import RouterSpec

_BITS = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # apart from each other, numbers times this differ in all bits


class UniformRouting:
    """The draws of one model. seed: 0 to 2^32 - 1."""

    def __init__(self, router: RouterSpec, seed: int, device: torch.device | None = None) -> None:
        self._top_k, self.seed = router.top_k, seed
        self._experts = torch.arange(router.num_experts, device=device)

    def identify(self, numbers: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Names each token: [T] int64.

        Args:
            numbers: [T] int64, of its request. positions: [T] int64, in its sequence.
        """
        return _mixed(_mixed(_mixed(numbers ^ self.seed) ^ (numbers >> 32) ^ _GOLDEN) ^ positions)

    def draw(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        """Distinct experts of each token. tokens: [T], of identify(). Returns: [T, K] int64."""
        state = _mixed(tokens ^ ((layer + 1) * _GOLDEN & _BITS))
        keys = _mixed(state[:, None] ^ (self._experts * _GOLDEN & _BITS))
        # The id in the low digits: no two keys of a token are equal, so the order never is a matter of taste.
        ordered = keys * len(self._experts) + self._experts
        return torch.topk(ordered, self._top_k, dim=-1).indices


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A permutation of 32-bit numbers in which every bit of x changes about half of the result's."""
    x = x & _BITS
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _BITS
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _BITS
    return x ^ (x >> 16)
