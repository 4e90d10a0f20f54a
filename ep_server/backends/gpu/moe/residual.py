"""How the result of a block gets into the residual stream: added and normed in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.backends.gpu.kernels.triton.local_rows import Answers, add_answers_norm
from ep_server.backends.gpu.kernels.triton.norm import add_rms_norm
from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.backends.gpu.moe.rows import Unsent
from ep_server.exchange.api import AddNorm


@dataclass(frozen=True, slots=True)
class Both:
    """The sum of two branches, rounded. routed, shared: [T, H] of the stream's dtype, contiguous."""

    routed: torch.Tensor
    shared: torch.Tensor


# Added to the residual stream: [T, H], or what it is a sum of.
Branch = torch.Tensor | Partial | Answers | Unsent | Both


def add_norm(branch: Branch, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds a branch to the residual stream, [T, H]. Returns the sum normed, maybe in place of the branch.

    Args:
        weight: [H], of the norm.
    """
    if isinstance(branch, Unsent):
        norm = AddNorm(residual, weight, eps, branch.shared)
        if branch.exchange.can_norm(norm):
            return branch.run(norm)
        routed, shared = branch.run().to(residual.dtype), branch.shared
        branch = routed if shared is None else Both(routed, shared)
    if isinstance(branch, Answers):
        out = torch.empty_like(residual)
        add_answers_norm(branch, residual, weight, eps, out)
    elif isinstance(branch, Both):
        out = branch.routed
        add_rms_norm(branch.routed, residual, weight, eps, out, branch.shared)
    else:
        out = torch.empty_like(residual) if isinstance(branch, Partial) else branch
        add_rms_norm(branch, residual, weight, eps, out)
    return out
