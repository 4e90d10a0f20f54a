"""A latent attention layer with chunks on Hopper: expanded, against the absorbed form of Triton's kernel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.gpu.assembly import GpuPlan, gpu_runner
from ep_server.backends.gpu.runner import GpuRunner
from ep_server.backends.gpu.step_input import StepTensors
from ep_server.backends.torch_compute import TorchCompute
from ep_server.ranks.devices import rows_of
from ep_server.records import SeqSlice, StepBatch
from tests.support.gpu.specialised import MLA
from tests.support.gpu.whole_steps import exchange

pytestmark = pytest.mark.gpu
BLOCK, BLOCKS, TOKENS, SEQUENCES = 16, 1200, 2048, 8
SHAPE = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
HIDDEN, DEVICE = 64, torch.device("cuda", 0)
Pieces = tuple[tuple[int, int], ...]  # (start, tokens)
STEPS: dict[str, Pieces] = {
    "one prompt": ((0, 700),),
    "a chunk behind others": ((4000, 300),),
    "chunks and single tokens": ((1000, 257), (900, 1), (0, 130), (33, 1), (5000, 2)),
}


@pytest.fixture(params=[(16, None, "auto"), (32, 96, "auto"), (32, 96, "fp8_e4m3")], ids=str)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> GpuRunner:
    """Of random weights. heads, channels between the two projections of queries, and what the cache holds."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for Hopper")
    heads, q_lora, cached = request.param
    config = MLA | SHAPE | {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": q_lora}
    (tmp_path / "config.json").write_text(json.dumps(config))
    params = LoadParams(str(tmp_path), 0, (0,) * 16, "bfloat16", compute=TorchCompute(DEVICE))
    model = load_model(replace(params, load_format="dummy", kv_dtype=cached))
    carried = exchange(model, None)
    plan = GpuPlan(BLOCKS, BLOCK, SEQUENCES, TOKENS, useful_blocks=BLOCKS, graphs=False, copies=True)
    return gpu_runner(model, carried, rows_of(carried), plan, BLOCKS)


def batch_of(pieces: Pieces) -> StepBatch:
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    slices = []
    for number, (start, tokens) in enumerate(pieces):
        held = -(-(start + tokens) // BLOCK)
        mine, order = tuple(order[:held]), order[held:]
        slices.append(SeqSlice(number, start, (0,) * tokens, mine, True))
    return StepBatch(tuple(slices), sum(tokens for _, tokens in pieces))


def attention(runner: GpuRunner, step: StepTensors, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of random rows behind random latents: the layer's result, and its cache."""
    generator = torch.Generator(device=DEVICE).manual_seed(layer)
    cache = runner.kv_cache.layers[layer].k
    cache.copy_(torch.randn(cache.shape, device=DEVICE, generator=generator).to(cache.dtype))
    x = torch.randn(step.tokens, HIDDEN, device=DEVICE, generator=generator).to(torch.bfloat16)
    decoder: Any = runner._decoder
    with torch.inference_mode():
        out = decoder._attention(x, layer, decoder._attention_step(step))
    torch.cuda.synchronize()
    return out.float(), cache.float().clone()


@pytest.mark.parametrize("padded", [0, 768], ids=["as it is", "padded"])
@pytest.mark.parametrize("name", STEPS)
def test_a_layer_gives_what_the_absorbed_form_gives(runner: GpuRunner, name: str, padded: int) -> None:
    """Also where only the device knows which rows are single tokens, as in a graph."""
    batch = batch_of(STEPS[name])
    given = runner._inputs[0]
    for layer in range(2):
        absorbed_step = given.fill(batch, {}, padded, copy=False)
        assert not absorbed_step.copied
        absorbed, written = attention(runner, absorbed_step, layer)
        step = given.fill(batch, {}, padded, copy=True)
        assert step.copied
        out, again = attention(runner, step, layer)
        assert torch.equal(written, again)
        rows = slice(0, batch.num_tokens)
        error = (out[rows] - absorbed[rows]).norm(dim=1) / absorbed[rows].norm(dim=1)
        assert bool(error.isfinite().all()) and float(error.max()) < 0.06 and float(error.mean()) < 0.02
        if padded:
            assert not out[batch.num_tokens + SEQUENCES :].any()
