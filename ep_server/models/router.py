"""[7] Which experts a token goes to, and with what weight. All arithmetic is float32.

Order of operations, one table for every family (see RouterSpec):
  1 logits = x @ router            4 ids = top-k of the choice
  2 score = softmax or sigmoid     5 weight = score of the chosen, without the bias
  3 choice = score + bias,         6 weight /= sum + eps        (renormalise)
    limited to the best groups     7 weight *= scale
"""

from __future__ import annotations

import torch

from ep_server.models.families.spec import GroupScore, RouterSpec, Score
from ep_server.models.layers import MoeWeights

_LANES = 64  # rows of whole vectors, on any processor


def route(
    x: torch.Tensor, weights: MoeWeights, spec: RouterSpec, drawn: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes x: [T, H]. Returns ids [T, K] int64, distinct per token, and weights [T, K] float32.

    Args:
        drawn: [T, K], ids in place of the router's choice.
    """
    logits = weights.router(x.float())
    score = logits.softmax(-1) if spec.score is Score.SOFTMAX else _sigmoid(logits)
    ids = drawn
    if ids is None:
        choice = score if weights.bias is None else score + weights.bias
        if spec.groups > 1:
            choice = _limit_to_groups(choice, spec)
        ids = torch.topk(choice, spec.top_k, dim=-1).indices
    gates = score.gather(1, ids)
    if spec.renormalise:
        total = gates.sum(-1, keepdim=True)
        gates = gates / (total + spec.renorm_eps if spec.renorm_eps else total)
    return ids, gates * spec.scale if spec.scale != 1.0 else gates


def _limit_to_groups(choice: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Sets every expert outside the token's best groups to -inf."""
    grouped = choice.view(len(choice), spec.groups, spec.num_experts // spec.groups)
    if spec.group_score is GroupScore.MAX:
        group_score = grouped.amax(-1)
    else:
        group_score = grouped.topk(2, dim=-1).values.sum(-1)
    best = torch.topk(group_score, spec.top_groups, dim=-1).indices
    outside = torch.ones_like(group_score, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside[..., None], float("-inf")).flatten(1)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """Of [T, E], the same bits for a row wherever it lies: torch's last few elements take another path."""
    missing = -logits.shape[1] % _LANES
    return torch.nn.functional.pad(logits, (0, missing)).sigmoid()[:, : logits.shape[1]]
