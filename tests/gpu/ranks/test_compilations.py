"""Kernels that Triton compiles are counted as it does so; rank processes compile none once they are ready."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.launch import Compilations
from tests.support.models.answers import Answers
from tests.support.ranks.gpu_engine import MANY, SIZES, drawn

pytestmark = pytest.mark.gpu


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
    answers: dict[str, Answers], kind: str, cache: str, overlap: str
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
