"""The router's order of operations: a table worked by hand, and loops in Python for every kind of router."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.families.spec import GroupScore, RouterSpec, Score
from ep_server.models.layers import MoeWeights
from ep_server.models.moe import route


def unused(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The experts of a block whose router alone is tested."""
    raise AssertionError("the router ran the experts")


SIGMOID = RouterSpec(6, 2, score=Score.SIGMOID, bias=True)


def moe(logits: list[float], bias: list[float] | None = None) -> tuple[torch.Tensor, MoeWeights]:
    """A token whose router logits are exactly these."""
    router = TorchCompute().linear(torch.eye(len(logits)))
    weights = MoeWeights(router, unused, None if bias is None else torch.tensor(bias))
    return torch.tensor([logits]), weights


def logit(p: float) -> float:
    return math.log(p / (1 - p))


@dataclass(frozen=True)
class Row:
    """scores: sigmoid of the logits (or softmax, where they sum to 1). expected: expert -> weight."""

    spec: RouterSpec
    scores: tuple[float, ...]
    expected: dict[int, float]
    bias: tuple[float, ...] | None = None


P = (0.1, 0.3, 0.05, 0.25, 0.2, 0.1)  # softmax scores, sum 1
S = (0.9, 0.2, 0.8, 0.7, 0.6, 0.5)  # sigmoid scores
ZERO = (0.0,) * 6
TABLE = {
    "softmax": Row(RouterSpec(6, 2), P, {1: 0.3, 3: 0.25}),
    "softmax-renorm": Row(RouterSpec(6, 2, renormalise=True), P, {1: 0.3 / 0.55, 3: 0.25 / 0.55}),
    "softmax-scale": Row(RouterSpec(6, 2, scale=16.0), P, {1: 4.8, 3: 4.0}),
    "renorm-then-scale": Row(
        RouterSpec(6, 2, renormalise=True, scale=2.0), P, {1: 0.6 / 0.55, 3: 0.5 / 0.55}
    ),
    # groups (0, 1) (2, 3) (4, 5): best experts .3 .25 .2; one group stays, both its experts are taken
    "groups-max": Row(RouterSpec(6, 2, groups=3, top_groups=1), P, {1: 0.3, 0: 0.1}),
    "groups-max-2": Row(RouterSpec(6, 2, groups=3, top_groups=2), P, {1: 0.3, 3: 0.25}),
    "sigmoid": Row(SIGMOID, S, {0: 0.9, 2: 0.8}, ZERO),
    # the bias chooses expert 1 and never enters its weight
    "bias-chooses-only": Row(SIGMOID, S, {1: 0.2, 0: 0.9}, (0.0, 5.0, 0.0, 0.0, 0.0, 0.0)),
    "bias-renorm-scale": Row(
        replace(SIGMOID, renormalise=True, renorm_eps=1e-20, scale=2.5),
        S,
        {1: 2.5 * 0.2 / 1.1, 0: 2.5 * 0.9 / 1.1},
        (0.0, 5.0, 0.0, 0.0, 0.0, 0.0),
    ),
    # sums of two: 1.1, 1.5, 1.1 -> group 1, although expert 0 is the best of all
    "groups-top2": Row(
        replace(SIGMOID, groups=3, top_groups=1, group_score=GroupScore.TOP2_SUM), S, {2: 0.8, 3: 0.7}, ZERO
    ),
    "groups-top2-count-the-bias": Row(
        replace(SIGMOID, groups=3, top_groups=1, group_score=GroupScore.TOP2_SUM),
        S,
        {5: 0.5, 4: 0.6},
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.6),
    ),
    # negative choices still win over experts outside the group
    "groups-negative": Row(
        replace(SIGMOID, groups=3, top_groups=1, group_score=GroupScore.TOP2_SUM),
        S,
        {2: 0.8, 3: 0.7},
        (-9.0, -9.0, -5.0, -5.0, -9.0, -9.0),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str) -> None:
    row = TABLE[name]
    softmax = row.spec.score is Score.SOFTMAX
    x, weights = moe([math.log(s) if softmax else logit(s) for s in row.scores], row.bias and list(row.bias))
    ids, gates = route(x, weights, row.spec)
    assert (ids.dtype, gates.dtype) == (torch.int64, torch.float32)
    assert dict(zip(ids[0].tolist(), gates[0].tolist(), strict=True)) == pytest.approx(row.expected)
    assert ids[0].tolist() == list(row.expected)  # best choice first


def test_all_scores_zero_are_no_nan() -> None:
    spec = replace(SIGMOID, renormalise=True, renorm_eps=1e-20)
    _, gates = route(*moe([-200.0] * 6, [0.0] * 6), spec)
    assert gates.tolist() == [[0.0, 0.0]]


def test_bfloat16_tokens_route_in_float32() -> None:
    torch.manual_seed(0)
    weights = MoeWeights(TorchCompute().linear(torch.randn(6, 32)), unused)
    x = torch.randn(50, 32).bfloat16()
    one, two = route(x, weights, RouterSpec(6, 3)), route(x.float(), weights, RouterSpec(6, 3))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_no_tokens() -> None:
    weights = MoeWeights(TorchCompute().linear(torch.randn(6, 32)), unused, torch.zeros(6))
    spec = replace(SIGMOID, groups=3, top_groups=2, group_score=GroupScore.TOP2_SUM)
    ids, gates = route(torch.empty(0, 32), weights, spec)
    assert ids.shape == gates.shape == (0, 2)
