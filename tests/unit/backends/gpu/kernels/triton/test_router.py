"""Against the CPU engine's router, which is tested against each family's own code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.backends.gpu.kernels.triton.router import Choice, Drawn, route
from ep_server.backends.torch_compute import TorchCompute
from ep_server.errors import InternalError
from ep_server.models.families.spec import GroupScore, RouterSpec, Score
from ep_server.models.layers import MoeWeights
from ep_server.models.moe import UniformRouting
from ep_server.models.moe import route as oracle
from tests.support.triton.harness import DEVICE, NAN, in_parts, poisoned, random

V3 = RouterSpec(
    24, 4, score=Score.SIGMOID, bias=True, groups=6, top_groups=3, group_score=GroupScore.TOP2_SUM,
    renormalise=True, renorm_eps=1e-20, scale=2.5,
)  # fmt: skip
SPECS = {
    "qwen3": RouterSpec(128, 8, renormalise=True),
    "mixtral": RouterSpec(8, 2, renormalise=True),
    "olmoe": RouterSpec(61, 7),
    "deepseek-v2-lite": RouterSpec(20, 6, scale=1.5),
    "deepseek-v2": RouterSpec(18, 3, groups=3, top_groups=2, group_score=GroupScore.MAX, scale=16.0),
    "deepseek-v3": V3,
    "odd-groups": replace(V3, num_experts=35, groups=5, top_groups=2, top_k=5),
    "no-groups-limit": replace(V3, groups=1, top_groups=1),
    "all": RouterSpec(5, 5, renormalise=True),
    "one": RouterSpec(1, 1),
}


def never(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the router ran the experts")


def expected(logits: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec) -> tuple[torch.Tensor, ...]:
    weights = MoeWeights(
        TorchCompute().linear(torch.eye(spec.num_experts)), never, None if bias is None else bias.cpu()
    )
    return tuple(x.to(DEVICE) for x in oracle(logits.cpu(), weights, spec))


def run(
    logits: torch.Tensor | Partial, bias: torch.Tensor | None, spec: RouterSpec, tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(logits) if isinstance(logits, torch.Tensor) else logits.sums.shape[1]
    ids = torch.full((rows, spec.top_k), 12345, device=DEVICE)
    weights = torch.full((rows, spec.top_k), NAN, device=DEVICE)
    count = None if tokens is None else torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
    route(logits, Choice(spec, ids, weights, bias, count))
    return ids, weights


@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_router(name: str) -> None:
    """Rows of logits lie in wider ones of NaN; best choice first, as the oracle."""
    spec = SPECS[name]
    logits = poisoned(random(9, spec.num_experts, scale=2.0), 3)
    bias = random(spec.num_experts, seed=1, scale=0.3) if spec.bias else None
    ids, weights = run(logits, bias, spec)
    want_ids, want_weights = expected(logits, bias, spec)
    assert torch.equal(ids, want_ids)
    assert torch.allclose(weights, want_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "odd-groups"])
def test_partial_sums_of_logits(name: str, parts: int) -> None:
    """As of the product, which is not rounded."""
    spec = SPECS[name]
    given, logits = in_parts(parts, 5, spec.num_experts)
    bias = random(spec.num_experts, seed=1, scale=0.3) if spec.bias else None
    ids, weights = run(given, bias, spec)
    want_ids, want_weights = run(logits, bias, spec)
    assert torch.equal(ids, want_ids)
    assert torch.allclose(weights, want_weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("ways", [1, 3, 12])
@pytest.mark.parametrize("name", ["qwen3", "olmoe", "odd-groups", "one"])
def test_ids_are_slots_of_a_tokens_way(name: str, ways: int) -> None:
    spec, tokens = SPECS[name], 7
    logits = random(tokens, spec.num_experts)
    bias = random(spec.num_experts, seed=1, scale=0.3) if spec.bias else None
    slots = torch.randperm(ways * spec.num_experts, generator=torch.Generator().manual_seed(1))
    slots = slots.view(ways, spec.num_experts).to(DEVICE, torch.int32)
    experts, wanted = run(logits, bias, spec)
    ids, weights = torch.empty_like(experts), torch.empty_like(wanted)
    live = torch.tensor([tokens - 1], dtype=torch.int32, device=DEVICE)
    route(logits, Choice(spec, ids, weights, bias, live, slots=slots))
    way = torch.arange(tokens - 1, device=DEVICE)[:, None] % ways
    assert torch.equal(ids[:-1], slots[way, experts[:-1]].long())
    assert (ids[-1] == -1).all() and torch.equal(weights[:-1], wanted[:-1])


@pytest.mark.parametrize("name", SPECS)
def test_equal_choices_go_to_the_lower_id(name: str) -> None:
    spec = SPECS[name]
    bias = torch.zeros(spec.num_experts, device=DEVICE) if spec.bias else None
    ids, weights = run(torch.zeros(2, spec.num_experts, device=DEVICE), bias, spec)
    assert ids.tolist() == [list(range(spec.top_k))] * 2
    assert torch.allclose(weights, expected(torch.zeros(2, spec.num_experts), bias, spec)[1])


def test_negative_choices_win_over_experts_outside_the_groups() -> None:
    bias = torch.full((24,), -9.0, device=DEVICE)
    logits = random(5, 24)
    ids, weights = run(logits, bias, V3)
    want_ids, want_weights = expected(logits, bias, V3)
    assert torch.equal(ids, want_ids) and torch.allclose(weights, want_weights)


def test_scores_of_zero_are_no_nan() -> None:
    _, weights = run(torch.full((1, 24), -200.0, device=DEVICE), torch.zeros(24, device=DEVICE), V3)
    assert weights.tolist() == [[0.0] * 4]


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "deepseek-v2"])
def test_nan_gives_nan_weights_and_valid_ids(name: str) -> None:
    spec = SPECS[name]
    logits = random(3, spec.num_experts)
    logits[1] = NAN
    bias = torch.zeros(spec.num_experts, device=DEVICE) if spec.bias else None
    ids, weights = run(logits, bias, spec)
    assert weights.isnan().all(dim=1).tolist() == [False, True, False]
    assert len(set(ids[1].tolist())) == spec.top_k
    assert bool(((ids >= 0) & (ids < spec.num_experts)).all())


@pytest.mark.parametrize("tokens", [0, 2, 5])
def test_padding_rows(tokens: int) -> None:
    """Their logits are NaN; nothing is sent for them."""
    spec = SPECS["qwen3"]
    logits = random(5, 128)
    logits[tokens:] = NAN
    ids, weights = run(logits, None, spec, tokens)
    assert bool((ids[tokens:] == -1).all()) and not weights[tokens:].any()
    assert torch.equal(ids[:tokens], expected(logits[:tokens], None, spec)[0])


def test_no_tokens() -> None:
    assert run(random(0, 24), random(24), V3)[0].shape == (0, 4)


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(InternalError, match=r"logits: .*\[2, 23\]"):
        run(random(2, 23), random(24), V3)
    with pytest.raises(InternalError, match="bias: must be given"):
        run(random(2, 24), None, V3)
    with pytest.raises(InternalError, match="logits: "):
        run(Partial(random(3, 2, 9)), None, SPECS["mixtral"])
    with pytest.raises(InternalError, match="bias: must be None"):
        run(random(2, 8), random(8), SPECS["mixtral"])
    with pytest.raises(InternalError, match="ids"):
        route(random(2, 24), Choice(V3, torch.empty(2, 3, dtype=torch.int64), random(2, 4), random(24)))


@pytest.mark.parametrize("exponent", [0.0, 1.0])
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "olmoe"])
def test_drawn_experts_are_those_of_uniform_routing(name: str, exponent: float) -> None:
    """And get the weights that the router gives the chosen; padded rows get none."""
    spec, layer, seed = SPECS[name], 5, 0xFEDCBA98
    logits = random(9, spec.num_experts, scale=2.0)
    bias = random(spec.num_experts, seed=1, scale=0.3) if spec.bias else None
    numbers = torch.tensor([1, 2, 3, 1, 77777, (1 << 31) - 1, 5, 6, 7], dtype=torch.int32, device=DEVICE)
    positions = torch.arange(100, 109, dtype=torch.int32, device=DEVICE)
    ids, weights = (
        torch.empty(9, spec.top_k, dtype=torch.int64, device=DEVICE),
        torch.empty(9, spec.top_k, device=DEVICE),
    )
    live = torch.tensor([8], dtype=torch.int32, device=DEVICE)
    drawn = Drawn(numbers, positions, seed, layer, exponent)
    route(logits, Choice(spec, ids, weights, bias, live, drawn))
    routing = UniformRouting(spec, seed, torch.device(DEVICE), exponent)
    wanted = routing.draw(routing.identify(numbers.long(), positions.long()), layer)
    assert torch.equal(ids[:8], wanted[:8])
    scores = logits.sigmoid() if spec.score is Score.SIGMOID else logits.softmax(-1)
    gates = scores.gather(1, wanted)
    if spec.renormalise:
        gates = gates / (gates.sum(-1, keepdim=True) + spec.renorm_eps)
    torch.testing.assert_close(weights[:8], gates[:8] * spec.scale, rtol=1e-5, atol=1e-7)
    assert (ids[8] == -1).all() and (weights[8] == 0).all()
