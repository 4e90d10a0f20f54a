"""FP8 experts, rows and caches in the step of a GPU, against oracles that round the same way and no other.

Every token chooses all experts of these checkpoints, so no rounding turns a choice. Without a GPU the
kernels are interpreted; where there is one the same runs on it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ep_server.backends.gpu.moe.moe as gpu_experts
from ep_server.backends.assembly import RankModel
from ep_server.backends.cpu.runner import ModelRunner
from ep_server.backends.gpu.kernels.triton.expert_rows import ExpertRows, ExpertWeights
from ep_server.backends.gpu.moe.rows import PlainRows, RowsOfSteps
from ep_server.exchange.api import Payload, View
from ep_server.exchange.host import open_shm
from ep_server.exchange.quant import dequantise
from ep_server.exchange.segment import create_segment
from ep_server.models.decoder import DecoderParams
from ep_server.models.kv_cache import KvCache, KvLayer
from ep_server.models.loading import widen
from tests.support.compare import assert_close, assert_equal
from tests.support.gpu.whole_steps import exchange, load, logits_of, run, step_runner
from tests.support.models.checkpoints import Tiny
from tests.support.models.driver import BLOCK as KV_BLOCK
from tests.support.models.driver import BLOCKS, GreedySampler, exchange_spec, generate
from tests.support.models.fp8 import BLOCK, EXPERTS, Fp8Tiny, widened
from tests.support.models.kv_scales import with_scales
from tests.support.ranks.rank_group import greedy
from tests.support.triton.harness import DEVICE, FP8, INTERPRETED, codes

Fp8 = Callable[[str], Fp8Tiny]
NAMES = [pytest.param("qwen3_moe-fp8", marks=pytest.mark.slow), "deepseek_v3-fp8"]
IDS = [(i * i * 17 + 3 * i + 5) % 256 for i in range(14)]
PIECES = ((0, 7), (7, 10), *((i, i + 1) for i in range(10, len(IDS))))  # a prompt in two chunks, then tokens


def on_gpu(model: RankModel, payload: Payload | None = None, rows: RowsOfSteps | None = None) -> torch.Tensor:
    """Logits after each piece: [pieces, V]. rows: over an exchange of its own."""
    return logits_of(step_runner(model, payload, rows), IDS, PIECES)


def plainly(
    model: RankModel, payload: Payload | None = None, wrap: Callable[[int, KvLayer], KvLayer] | None = None
) -> torch.Tensor:
    """As on_gpu(), by the plain operations of the CPU engine. wrap: another cache for a layer."""
    cache = KvCache(model.spec, BLOCKS, KV_BLOCK, torch.float32, DEVICE)
    if wrap is not None:
        cache.layers = tuple(wrap(index, layer) for index, layer in enumerate(cache.layers))
    carried, sampler = exchange(model, payload), GreedySampler()
    params = DecoderParams(model.spec, model.weights, carried, cache, model.max_context, model.compute)
    run(ModelRunner(params, sampler), IDS, PIECES)
    return torch.stack(sampler.logits[1]).cpu()


def theirs(path: Path, dtype: torch.dtype) -> torch.Tensor:
    """Logits of transformers at the same places."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.inference_mode():
        logits = model(torch.tensor([IDS])).logits[0].float()
    return logits[[end - 1 for _, end in PIECES]]


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_codes_are_as_near_as_bfloat16_of_the_values(fp8: Fp8, name: str) -> None:
    """transformers in bfloat16 rounds the widened weights once more; nobody else's error is the bound."""
    made = fp8(name)
    expected = theirs(made.plain, torch.float32)
    bound = 1.5 * largest(theirs(made.plain, torch.bfloat16), expected)
    ours = on_gpu(load(made.path, "bfloat16"))
    assert 0 < largest(ours, expected) <= bound < 0.1 * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_codes_of_exact_values_give_what_the_values_give(fp8: Fp8, tmp_path: Path, name: str) -> None:
    """With scales that are powers of two bfloat16 holds the weights exactly: what is left is the order of
    float32 sums, which may turn single roundings of activations."""
    shutil.copytree(fp8(name).path, tmp_path / "codes")
    tensors = load_file(tmp_path / "codes" / "model.safetensors")
    for scale in (n for n in list(tensors) if n.endswith("_scale_inv")):
        tensors[scale] = torch.exp2(tensors[scale].log2().round())
    save_file(tensors, tmp_path / "codes" / "model.safetensors")
    plain = on_gpu(load(widened(tmp_path / "codes", tmp_path / "values"), "bfloat16"))
    kept = on_gpu(load(tmp_path / "codes", "bfloat16"))
    assert_close(kept, plain, "logits", abs_tol=2.0**-8 * float(plain.abs().max()))


def plain_experts(
    given: ExpertRows, weights: ExpertWeights, hidden: Any, out: torch.Tensor, **_: Any
) -> None:
    """run_experts() in float64 on widened rows and weights; one rounding in between and one at the end."""
    assert given.scales is not None and given.row_ids is None and not given.padded
    assert given.rows.dtype is weights.down.dtype is weights.gate_up.dtype is FP8
    rows = dequantise(given.rows, given.scales).double()
    for e, (first, end) in enumerate(pairwise(given.offsets.tolist())):
        halves = zip(weights.gate_up[e].chunk(2), weights.gate_up_scale[e].chunk(2), strict=True)
        gate, up = (rows[first:end] @ widen(*half, BLOCK).double().t() for half in halves)
        gated = (torch.nn.functional.silu(gate) * up).bfloat16().double()
        out[first:end] = gated @ widen(weights.down[e], weights.down_scale[e], BLOCK).double().t()


@pytest.mark.slow
@pytest.mark.parametrize("payload", [Payload.FP8, Payload.FP8_POW2])
@pytest.mark.parametrize("name", NAMES)
def test_rows_meet_weights_as_codes(
    fp8: Fp8, monkeypatch: pytest.MonkeyPatch, name: str, payload: Payload
) -> None:
    """Against products in float64 in the same step. Sums in another order turn a bfloat16 here and
    there, and a code of the next layer with it: what all roundings to bfloat16 cost is the bound."""
    made = fp8(name)
    model = load(made.path, "bfloat16")
    ours = on_gpu(model, payload)
    monkeypatch.setattr(gpu_experts, "run_experts", plain_experts)
    expected = on_gpu(model, payload)
    bound = largest(theirs(made.plain, torch.bfloat16), theirs(made.plain, torch.float32))
    assert_close(ours, expected, "logits", abs_tol=bound)
    values = load(made.plain, "float32")
    assert not torch.equal(plainly(values, payload), plainly(values))


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="this exchange is of host memory")
def test_rows_are_read_where_they_arrived(fp8: Fp8) -> None:
    """With their scales beside them, in a region whose rows have a pitch."""
    model, of_view = load(fp8("deepseek_v3-fp8").path, "bfloat16"), {}
    spec = replace(exchange_spec(model, 0, 1, (0,) * EXPERTS), payload=Payload.FP8)
    for view in (View.COMPACT, View.INDEX):
        fd = create_segment(spec)
        carried = open_shm(spec, fd)
        os.close(fd)
        rows = PlainRows(carried, view)
        of_view[view] = on_gpu(model, rows=RowsOfSteps(rows, rows))
        carried.close()
    assert_equal(of_view[View.INDEX], of_view[View.COMPACT], "logits")


@dataclass(frozen=True, slots=True)
class Rounded(KvLayer):
    """Holds what an FP8 cache with these scales reads back as. scales: [kv_heads] of k and v."""

    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        k_scale, v_scale = (s[:, None] for s in self.scales or ())
        k = codes(k, k_scale).float() * k_scale
        v = None if v is None else codes(v, v_scale).float() * v_scale
        KvLayer.write(self, slots, k, v)


KV_CASES = {"gqa": "qwen3_moe", "latent": "deepseek_v2-lite-yarn"}


@pytest.mark.parametrize("kind", KV_CASES)
def test_an_fp8_cache_rounds_keys_and_values_and_nothing_else(
    tiny: Callable[[str], Tiny], tmp_path: Path, kind: str
) -> None:
    """In float32 the oracle's keys and values are the same but for float32 roundings, which turn a code
    seldom: what is left is a twentieth of what the cache's rounding does."""
    path, scales = with_scales(tiny(KV_CASES[kind]), tmp_path / "scaled")
    model = load(path, "float32", "fp8_e4m3")
    values, ours = load(path, "float32"), on_gpu(model)
    exact = plainly(values)
    rounded = plainly(values, None, lambda i, layer: Rounded(layer.k, layer.v, layer.v_dim, scales[i]))
    effect = largest(rounded, exact)
    assert effect > 1e-2
    assert largest(ours, rounded) < 0.05 * effect
    assert model.kv_block_bytes(KV_BLOCK) * 4 == values.kv_block_bytes(KV_BLOCK)


@pytest.mark.slow
def test_scales_of_one_where_the_checkpoint_has_none(tiny: Callable[[str], Tiny]) -> None:
    path = tiny("qwen3_moe").path
    ones = (torch.ones(2, device=DEVICE),) * 2
    values = load(path, "float32")
    exact = plainly(values)
    rounded = plainly(values, None, lambda _, layer: Rounded(layer.k, layer.v, layer.v_dim, ones))
    assert largest(on_gpu(load(path, "float32", "fp8_e4m3")), rounded) < 0.05 * largest(rounded, exact)


def test_everything_in_fp8_at_once(fp8: Fp8) -> None:
    """Weights, rows and cache: the tokens are those of the widened model."""
    made = fp8("deepseek_v3-fp8")
    model = load(made.path, "bfloat16", "fp8_e4m3")
    runner = step_runner(model, Payload.FP8)
    for number, prompt in enumerate(made.prompts):
        runner.add(greedy(number, prompt, 3))
    assert generate(runner, made.prompts, 3, chunk=4) == list(made.tokens)
