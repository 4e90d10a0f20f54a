"""Weights and routing that are made up: the same for every number of ranks, finite, and evenly spread."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.torch_compute import TorchCompute
from ep_server.cli.main import main
from ep_server.config import Config, ModelConfig
from ep_server.errors import CheckpointError, StartupError
from ep_server.exchange.api import Exchange, Payload
from ep_server.frontend.served_model import ServedModel
from ep_server.models.dummy import CPU_ELEMENTS, DummyReader, draw
from ep_server.models.families import read_spec
from ep_server.models.families.spec import RouterSpec
from ep_server.models.inspect import inspect_checkpoint, inspect_config
from ep_server.models.layers import MoeWeights
from ep_server.models.moe import UniformRouting
from ep_server.models.weights import weights_from
from ep_server.ranks.group import plan_group
from tests.support.compare import assert_equal
from tests.support.exchange.ranks import run_ranks
from tests.support.models.checkpoints import CASES, EXPERTS, HIDDEN, PROMPT_LENGTHS, TOP_K, VOCAB, Tiny
from tests.support.models.driver import generate, runner

Get = Callable[[str], Tiny]
NAMES = [case.name for case in CASES]
PLACEMENTS = {1: (0,) * EXPERTS, 2: (0, 1, 1, 0, 0, 1)}
NEW = 12


@pytest.fixture(scope="module")
def bare(tiny: Get, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory that holds the config.json of a case and nothing else."""

    def get(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        shutil.copy(tiny(name).path / "config.json", directory)
        return directory

    return get


@pytest.mark.parametrize("name", NAMES)
def test_a_description_is_enough_to_inspect(tiny: Get, bare: Callable[[str], Path], name: str) -> None:
    real, made_up = inspect_checkpoint(tiny(name).path), inspect_config(bare(name))
    assert made_up.parameters == real.parameters
    assert made_up.active_parameters == real.active_parameters
    assert (made_up.shards, made_up.file_bytes) == ((), 0)
    assert ServedModel.load(ModelConfig(path=str(bare(name)))).tokenizer is None
    with pytest.raises(CheckpointError, match="neither model"):
        load_model(LoadParams(str(bare(name)), 0, (0,) * EXPERTS))


def test_the_command_inspects_a_description(
    bare: Callable[[str], Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    made_up = ["inspect", str(bare("olmoe") / "config.json"), "--ranks", "2"]
    assert main([*made_up, "--load-format", "dummy"]) == 0
    out = capfd.readouterr().out
    assert "not read: dummy weights" in out and "0 to 2 (3)" in out
    assert main(made_up) == 1
    assert "neither model.safetensors nor" in capfd.readouterr().err
    assert main([*made_up, "--load-format", "made-up"]) == 1
    assert "model.load_format = 'made-up': must be one of auto, dummy" in capfd.readouterr().err


def test_what_does_not_fit_is_refused_with_the_numbers(bare: Callable[[str], Path]) -> None:
    made_up = {"model.path": str(bare("mixtral")), "model.load_format": "dummy", "parallel.ranks": 2}
    config = Config.from_values(made_up)
    assert plan_group(config, available=1 << 30).weight_bytes[0] > 0
    with pytest.raises(StartupError, match=r"does not fit: [\d.]+ GiB of weights, .* more than the 0.10 GiB"):
        plan_group(config, available=int(0.1 * 2**30))


def test_ranks_agree_on_what_they_share_and_own(bare: Callable[[str], Path]) -> None:
    spec = read_spec(bare("deepseek_v3"))

    def load(*experts: int, seed: int = 0) -> list[MoeWeights]:
        source = DummyReader(spec, seed)
        weights = weights_from(source, spec, experts, torch.float32, TorchCompute())
        return [layer.ffn for layer in weights.layers if isinstance(layer.ffn, MoeWeights)]

    for all_of_them, some, others in zip(load(*range(EXPERTS)), load(1, 4), load(1, 4, seed=1), strict=True):
        assert_equal(some.router.weight, all_of_them.router.weight, "router")
        assert_equal(some.experts.gate_up[1], all_of_them.experts.gate_up[4], "expert 4")
        assert_equal(some.experts.down[0], all_of_them.experts.down[1], "expert 1")
        assert not torch.equal(some.experts.down[0], some.experts.down[1])
        assert not torch.equal(some.router.weight, others.router.weight)


def test_the_spread_of_a_matrix_is_that_of_an_initialiser(bare: Callable[[str], Path]) -> None:
    spec = dataclasses.replace(read_spec(bare("mixtral")), hidden=400)
    untied, tied = DummyReader(spec, 3), DummyReader(dataclasses.replace(spec, tied_head=True), 3)
    matrix = untied.read("model.layers.0.self_attn.o_proj.weight", (300, 400))
    assert matrix.std().item() == pytest.approx(1 / 20, rel=0.02)
    assert abs(matrix.mean().item()) < 1e-3
    table = ("model.embed_tokens.weight", (300, 400))
    assert untied.read(*table).std().item() == pytest.approx(1, rel=0.02)
    assert tied.read(*table).std().item() == pytest.approx(1 / 20, rel=0.02)
    assert untied.read("model.norm.weight", (7,)).tolist() == [1.0] * 7
    assert untied.read("model.layers.0.self_attn.q_proj.bias", (7,)).tolist() == [0.0] * 7


Tokens = dict[tuple[str, str], list[tuple[int, ...]]]  # by name of the case and routing


def test_draws_are_those_of_plain_integer_arithmetic() -> None:
    """An oracle in numpy, over more elements than are drawn at once."""
    count, seed = CPU_ELEMENTS * 2 + 77, -123456789
    x = (np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9)) ^ np.uint32(seed % 2**32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    x = (x ^ (x >> np.uint32(16))).astype(np.int32)
    drawn = draw(count, seed, 0.75, torch.device("cpu"))
    np.testing.assert_allclose(drawn.numpy(), x * (0.75 / 2**31), rtol=1e-6)
    assert len(torch.unique(drawn)) > 0.98 * count
    other = draw(count, seed + 1, 0.75, torch.device("cpu"))
    both = torch.stack([drawn[:-1], drawn[1:], other[1:]]).corrcoef()
    assert (both - torch.eye(3)).abs().max() < 0.015  # neighbours, and tensors, have nothing in common


def _tokens(exchange: Exchange, paths: dict[str, str]) -> Tokens:
    """Of every checkpoint and routing, for this rank's prompts: those of the group are dealt out in turn."""
    spec, results = exchange.spec, {}
    own = range(spec.rank, len(PROMPT_LENGTHS), spec.num_ranks)
    for name, path in paths.items():
        for routing in ("router", "uniform"):
            made_up = {"load_format": "dummy", "routing": routing, "seed": 5}
            model = load_model(LoadParams(path, spec.rank, spec.placement, "float32", **made_up))
            prompts, on = [_prompt(number) for number in own], runner(model, exchange)
            results[name, routing] = generate(on, prompts, NEW, micro_batches=2, steps=NEW + 2, numbers=own)
    return results


def _prompt(number: int) -> tuple[int, ...]:
    return tuple((i * i * 31 + 7 * number) % VOCAB for i in range(PROMPT_LENGTHS[number]))


def test_tokens_do_not_depend_on_the_number_of_ranks(bare: Callable[[str], Path]) -> None:
    paths = {name: str(bare(name)) for name in NAMES}
    fixed = {"max_tokens": 64, "hidden": HIDDEN, "top_k": TOP_K, "payload": Payload.FP32}
    (alone,) = run_ranks(_tokens, 1, fixed | {"placement": PLACEMENTS[1]}, args=(paths,))
    two = run_ranks(_tokens, 2, fixed | {"placement": PLACEMENTS[2]}, args=(paths,))
    for case, expected in alone.items():
        assert [two[n % 2][case][n // 2] for n in range(len(PROMPT_LENGTHS))] == expected, case
        assert {len(tokens) for tokens in expected} == {NEW}
        assert len({token for tokens in expected for token in tokens}) > NEW / 2, case
    assert all(alone[name, "router"] != alone[name, "uniform"] for name in NAMES)


def test_draws_are_even_and_of_their_token_alone() -> None:
    router = RouterSpec(num_experts=6, top_k=3)
    routing, reseeded = UniformRouting(router, seed=9), UniformRouting(router, seed=10)
    numbers, positions = torch.arange(1, 101).repeat_interleave(200), torch.arange(200).repeat(100)
    tokens = routing.identify(numbers, positions)
    ids = routing.draw(tokens, 2)
    assert ids.shape == (20_000, 3) and ids.sort(dim=1).values.diff(dim=1).min() > 0
    sets = Counter(tuple(sorted(row)) for row in ids.tolist())
    expected = 20_000 / math.comb(6, 3)
    chi_square = sum((sets[s] - expected) ** 2 / expected for s in combinations(range(6), 3))
    assert (
        5 < chi_square < 44
    )  # 19 degrees of freedom: outside once in a thousand seeds, and this one is fixed
    order = torch.randperm(20_000, generator=torch.Generator().manual_seed(0))
    assert_equal(routing.draw(tokens[order], 2), ids[order], "draws of a shuffled batch")
    for other in (
        routing.draw(tokens, 3),
        routing.draw(routing.identify(numbers, positions + 1), 2),
        routing.draw(routing.identify(numbers + 1, positions), 2),
        reseeded.draw(reseeded.identify(numbers, positions), 2),
    ):
        same = (other.sort(dim=1).values == ids.sort(dim=1).values).all(dim=1).float().mean().item()
        assert same == pytest.approx(1 / math.comb(6, 3), abs=0.01)


def test_zipf_draws_popular_experts_more_often() -> None:
    """The first of a draw's experts comes by weight; the others follow without it."""
    router = RouterSpec(num_experts=6, top_k=2)
    routing = UniformRouting(router, seed=9, exponent=1.0)
    tokens = routing.identify(torch.arange(1, 20_001), torch.zeros(20_000, dtype=torch.int64))
    weights = [1 / n for n in range(1, 7)]
    for layer in (0, 1):
        ids = routing.draw(tokens, layer)
        assert ids.sort(dim=1).values.diff(dim=1).min() > 0
        popular = [(place - 31 * layer) % 6 for place in range(6)]  # the layer's experts, most popular first
        found = torch.bincount(ids[:, 0], minlength=6)[popular] / len(tokens)
        assert found.tolist() == pytest.approx([w / sum(weights) for w in weights], abs=0.015)
