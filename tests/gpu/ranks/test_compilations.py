"""Kernels that Triton compiles are counted as it does so; rank processes compile none once they are ready."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import Compilations
from tests.support.handoff.servers import continued, counted, held, pair
from tests.support.models.answers import Answers
from tests.support.ranks.gpu_engine import MANY, SIZES, drawn

pytestmark = pytest.mark.gpu
LATE = "not compiled at start"  # as ranks log it


@triton.jit
def _fill_kernel(out, value, WIDTH: tl.constexpr):
    tl.store(out + tl.arange(0, WIDTH), value)


def test_a_kernel_counts_once_for_each_of_its_forms() -> None:
    found, out = Compilations(), torch.zeros(16, device="cuda")
    for value, width, expected in ((3, 8, 1), (5, 8, 1), (1, 8, 2), (3, 16, 3), (1, 8, 3)):
        _fill_kernel[(1,)](out, value, WIDTH=width)
        assert found.count == expected


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("qwen3_moe", "auto"),
        ("qwen3_moe-wide-heads", "auto"),
        ("qwen3_moe-wide-heads", "fp8_e4m3"),
        ("deepseek_v2", "auto"),
    ],
)
async def test_ranks_compile_nothing_in_traffic(
    answers: dict[str, Answers], kind: str, cache: str, overlap: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Prompts of all sizes beside single tokens, many and few of these."""
    model = next(model for name, model in sorted(answers.items()) if name.startswith(kind))
    ranks = SIZES[-1]
    times = -(-MANY * ranks // len(model.prompts))
    room = {"scheduler__max_running": MANY, "scheduler__max_step_tokens": 512, "scheduler__kv_blocks": 4096}
    fields = {"model__dtype": "bfloat16", "parallel__overlap": overlap, "metrics__device_phases": 4}
    fields["model__kv_dtype"] = cache
    _, heard = await drawn(model, ranks, times, **fields, **room)
    assert heard.counter("kernels_compiled") == [0] * ranks
    assert LATE not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["qwen3_moe-wide-heads", "deepseek_v2"])
async def test_ranks_that_hand_off_compile_nothing_late(
    answers: dict[str, Answers], kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither before they serve, nor while blocks move from GPU to GPU and through host memory."""
    path = next(model.path for name, model in sorted(answers.items()) if name.startswith(kind))
    common: dict[str, Any] = {"model__path": str(path), "parallel__device": "cuda"}
    common |= {"scheduler__max_running": 8, "scheduler__max_step_tokens": 32, "scheduler__block_size": 16}
    fields: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, "bypass_prefix_cache": True}
    prompts = [[number, *range(1, length)] for number, length in enumerate((7, 40, 41, 120))]
    async with pair(common, common) as (prefill, decode):
        for ids in prompts:
            for local in (True, False):
                handle = await held(prefill, ids)
                handle.local = handle.local if local else ""
                output = await continued(decode, ids, handle, **fields)
                assert output.finished.usage.cached_tokens == len(ids) - 1
        await counted(decode, "handoffs/received", 2 * len(prompts))
        assert [side.count("kernels_compiled") for side in (prefill, decode)] == [0, 0]
    assert LATE not in capfd.readouterr().err
