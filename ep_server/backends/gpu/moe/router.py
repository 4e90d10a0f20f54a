"""[7] Which experts the tokens of a step go to, on a GPU: the router's product, then one kernel that chooses.

The product is streamed where there is a kernel for it (streamed_products.py), else the library's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ep_server.backends.gpu.kernels.hopper.products import StreamedProduct, product
from ep_server.backends.gpu.kernels.triton.router import Choice, Drawn, route
from ep_server.backends.gpu.step_input import StepTensors
from ep_server.models.families.spec import RouterSpec


@dataclass(frozen=True, slots=True)
class GpuRouter:
    """The router of a layer.

    layer: its number. weight: [E, H], see router_weight(). bias: [E] float32, see MoeWeights.
    streamed: the product in a kernel for few rows; None where there is none.
    seed: of experts drawn at random, None where the router chooses.
    """

    layer: int
    spec: RouterSpec
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    streamed: StreamedProduct | None = None
    seed: int | None = None

    def choose(self, x: torch.Tensor, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Of x: [T, H], normed: expert ids [T, K] int64, -1 for padded rows, and weights [T, K] float32."""
        ids = torch.empty(len(x), self.spec.top_k, dtype=torch.int64, device=x.device)
        gates = torch.empty(len(x), self.spec.top_k, dtype=torch.float32, device=x.device)
        drawn = None if self.seed is None else Drawn(step.numbers, step.positions, self.seed, self.layer)
        logits = product(x, self.streamed, self._logits)
        route(logits, Choice(self.spec, ids, gates, self.bias, step.live, drawn))
        return ids, gates

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """[T, E] float32: sums of float32, whatever is multiplied."""
        if self.weight.dtype is torch.float32:
            return F.linear(x.float(), self.weight)
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32)


def router_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight: [E, H] float32, in `dtype` where that holds it exactly: products then are the same."""
    narrow = weight.to(dtype)
    return narrow if weight.is_cuda and torch.equal(narrow.float(), weight) else weight
