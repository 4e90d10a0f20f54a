"""Against the product in float64 and the choice of router.route, which test_router compares with the CPU's.

Inputs are small integers, so that every order of summing gives the same float32: the same experts are wanted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep_server.errors import InternalError
from ep_server.model.families.spec import RouterSpec
from ep_server.model.triton.router import route
from ep_server.model.triton.router_choice import Choice, Drawn
from ep_server.model.triton.router_rows import MOST_EXPERTS, RouterSpace, RouterTile, fits, route_rows
from tests.model.triton.harness import DEVICE, INTERPRETED, NAN, poisoned, random
from tests.model.triton.test_router import SPECS, V3

BF16, F32 = torch.bfloat16, torch.float32


def whole(*shape: int, seed: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """-4 to 4: products and their sums are exact."""
    values = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(DEVICE)


def space_of(rows: int, weight: torch.Tensor, **sizes: int) -> RouterSpace:
    space = RouterSpace.of(rows, weight, **sizes)
    space.parts.fill_(NAN)
    return space


def choice_of(spec: RouterSpec, rows: int, live: int | None = None, drawn: Drawn | None = None) -> Choice:
    ids = torch.full((rows, spec.top_k), 12345, device=DEVICE)
    weights = torch.full((rows, spec.top_k), NAN, device=DEVICE)
    bias = random(spec.num_experts, seed=1, scale=0.3) if spec.bias else None
    count = None if live is None else torch.tensor([live], dtype=torch.int32, device=DEVICE)
    return Choice(spec, ids, weights, bias, count, drawn)


def expected(x: torch.Tensor, weight: torch.Tensor, choice: Choice) -> Choice:
    logits = (x.double() @ weight.double().t()).float()
    same = choice_of(choice.spec, len(x))
    wanted = replace(choice, ids=same.ids, weights=same.weights)
    route(logits, wanted)
    return wanted


def assert_same(got: Choice, wanted: Choice) -> None:
    assert torch.equal(got.ids, wanted.ids)
    torch.testing.assert_close(got.weights, wanted.weights, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("weight_dtype", [BF16, F32], ids=("bfloat16", "float32"))
@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_router(name: str, weight_dtype: torch.dtype) -> None:
    """Rows lie in wider ones of NaN; 37 rows are two tiles and a part of one, 300 channels no whole parts."""
    spec = SPECS[name]
    x = poisoned(whole(37, 300, seed=2, dtype=BF16) / 8, 5)
    weight = whole(spec.num_experts, 300, seed=3, dtype=weight_dtype) / 16
    choice = choice_of(spec, 37, 35)
    route_rows(x, weight, choice, space_of(37, weight))
    assert_same(choice, expected(x, weight, choice))


@pytest.mark.parametrize(("width", "parts"), [(24, 1), (64, 4), (2048, 8), (2048, 16), (640, 3)])
def test_channels_in_any_number_of_parts(width: int, parts: int) -> None:
    """Also in more than there are channels for."""
    spec = SPECS["qwen3"]
    x, weight = whole(5, width, seed=4, dtype=BF16), whole(128, width, seed=5, dtype=BF16) / 64
    choice = choice_of(spec, 5)
    route_rows(x, weight, choice, space_of(5, weight, parts=parts))
    assert_same(choice, expected(x, weight, choice))


@pytest.mark.parametrize("live", [0, 1, 16, 17, 40])
def test_padding_rows(live: int) -> None:
    """They are NaN; nothing is sent for them, and space for more rows does not matter."""
    x, weight = whole(40, 64, seed=6, dtype=BF16), whole(128, 64, seed=7, dtype=BF16) / 16
    x[live:] = NAN
    choice = choice_of(SPECS["qwen3"], 40, live)
    space = space_of(100, weight)
    route_rows(x, weight, choice, space)
    assert bool((choice.ids[live:] == -1).all()) and not choice.weights[live:].any()
    assert_same(choice, expected(x, weight, choice))
    assert not space.tickets.any()


def test_a_row_of_nan_stays_alone() -> None:
    x, weight = whole(20, 64, seed=8), whole(24, 64, seed=9) / 16
    x[3, 7] = NAN
    choice = choice_of(V3, 20)
    route_rows(x, weight, choice, space_of(20, weight))
    assert choice.weights.isnan().all(dim=1).nonzero().tolist() == [[3]]
    assert len(set(choice.ids[3].tolist())) == 4
    assert bool(((choice.ids >= 0) & (choice.ids < 24)).all())


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_drawn_experts(name: str) -> None:
    spec = SPECS[name]
    numbers = torch.arange(1, 20, dtype=torch.int32, device=DEVICE) * 7919
    drawn = Drawn(numbers, numbers // 3, 0xFEDCBA98, 5)
    x, weight = whole(19, 128, seed=10, dtype=BF16), whole(spec.num_experts, 128, seed=11, dtype=BF16) / 64
    choice = choice_of(spec, 19, 18, drawn)
    route_rows(x, weight, choice, space_of(19, weight))
    assert_same(choice, expected(x, weight, choice))
    undrawn = choice_of(spec, 19, 18)
    route_rows(x, weight, undrawn, space_of(19, weight))
    assert not torch.equal(choice.ids, undrawn.ids)


def test_space_is_used_again() -> None:
    """By calls of other rows and other numbers of them: tickets are left as they were found."""
    spec = SPECS["qwen3"]
    weight = whole(128, 2048, seed=12, dtype=BF16) / 64
    space = space_of(50, weight)
    for rows in (50, 3, 33, 50):
        x = whole(rows, 2048, seed=rows, dtype=BF16)
        choice = choice_of(spec, rows)
        route_rows(x, weight, choice, space)
        assert_same(choice, expected(x, weight, choice))
        assert not space.tickets.any()


@pytest.mark.parametrize("tokens", [16, 32])
@pytest.mark.parametrize("channels", [64, 128])
def test_other_tiles(tokens: int, channels: int) -> None:
    x, weight = whole(40, 512, seed=13, dtype=BF16), whole(128, 512, seed=14, dtype=BF16) / 64
    choice = choice_of(SPECS["qwen3"], 40)
    space = space_of(40, weight, tokens=tokens, parts=2)
    route_rows(x, weight, choice, space, RouterTile(channels, 4, 2))
    assert_same(choice, expected(x, weight, choice))


def test_products_are_not_rounded() -> None:
    """Weights that bfloat16 does not hold are multiplied as float32; sums err like those of float32."""
    x, weight = random(33, 700, dtype=BF16, seed=15), random(61, 700, seed=16, scale=700**-0.5)
    choice = choice_of(SPECS["olmoe"], 33)
    route_rows(x, weight, choice, space_of(33, weight))
    scores = (x.double() @ weight.double().t()).softmax(-1)
    torch.testing.assert_close(choice.weights.double(), scores.gather(1, choice.ids), rtol=1e-5, atol=0)
    torch.testing.assert_close(choice.weights.double(), scores.topk(7).values, rtol=1e-5, atol=0)


def test_no_rows() -> None:
    weight = whole(128, 64, seed=17)
    route_rows(whole(0, 64, seed=18), weight, choice_of(SPECS["qwen3"], 0), space_of(0, weight))


def test_what_it_is_used_for() -> None:
    """Rows of decode steps."""
    assert fits(1, 128) and fits(512, 256)
    assert not (fits(0, 128) or fits(513, 128) or fits(1, 257))


def test_wrong_inputs_are_named() -> None:
    x, weight = whole(20, 64, seed=19, dtype=BF16), whole(128, 64, seed=20, dtype=BF16)
    choice, space = choice_of(SPECS["qwen3"], 20), space_of(20, weight)
    with pytest.raises(InternalError, match=r"x: .*\[20, 63\].*any, 64"):
        route_rows(x[:, :63].contiguous(), weight, choice, space)
    with pytest.raises(InternalError, match=r"weight: torch.bfloat16"):
        route_rows(x.float(), weight, choice, space)
    with pytest.raises(InternalError, match=r"rows = 20: must be 0 to 16"):
        route_rows(x, weight, choice, space_of(16, weight))
    with pytest.raises(InternalError, match=r"parts: .*128"):
        route_rows(x, weight, choice, space_of(20, weight[:64]))
    with pytest.raises(InternalError, match=f"num_experts = 257: must be 1 to {MOST_EXPERTS}"):
        route_rows(x, weight, choice_of(RouterSpec(257, 8), 20), space)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="programs run one after the other, in their order")
@pytest.mark.parametrize("rows", [64, 256, 512])
def test_bits_do_not_depend_on_which_program_comes_last(rows: int) -> None:
    """2,000 replays of a captured call beside another stream's work."""
    x, weight = random(rows, 2048, dtype=BF16, seed=21), random(128, 2048, dtype=BF16, seed=22, scale=0.02)
    choice, space = choice_of(SPECS["qwen3"], rows), space_of(rows, weight)
    route_rows(x, weight, choice, space)
    torch.cuda.synchronize()
    first = choice.weights.clone(), choice.ids.clone()
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    with torch.cuda.graph(graph):
        route_rows(x, weight, choice, space)
        wrong += (choice.weights.view(torch.int32) != first[0].view(torch.int32)).sum()
        wrong += (choice.ids != first[1]).sum()
        choice.weights.fill_(NAN)
        choice.ids.fill_(12345)
    busy = torch.randn(1024, 1024, device=DEVICE)
    for _ in range(2000):
        graph.replay()
        with torch.cuda.stream(other):
            busy @ busy
    torch.cuda.synchronize()
    assert not wrong and not space.tickets.any()
