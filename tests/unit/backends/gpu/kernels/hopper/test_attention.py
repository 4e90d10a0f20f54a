"""How the attention kernel for Hopper is launched; its results need one (tests/gpu)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from ep_server.backends.gpu.kernels.hopper.attention import (
    HopperAttention,
    HopperAttentionStep,
    LaunchConfig,
    launch_config_for,
)
from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.backends.gpu.kernels.triton.rope import HeadNorm
from ep_server.backends.gpu.step_input import Singles, StepTensors
from ep_server.errors import InternalError
from ep_server.models.families.spec import GqaSpec
from ep_server.models.kv_cache import KvLayer

QWEN, BF16, EPS = GqaSpec(32, 4, 128, 128**-0.5), torch.bfloat16, 1e-6
ONE = LaunchConfig(1, 132)


def cache(size: int = 16, heads: int = 4, dim: int = 128, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(3, size, heads, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("sequences", "team"), [(1, 8), (32, 8), (33, 8), (34, 4), (66, 4), (67, 2), (132, 2), (133, 1), (256, 1)]
)
def test_all_teams_work_at_once_if_there_are_enough(sequences: int, team: int) -> None:
    assert launch_config_for(sequences, 4, 132) == LaunchConfig(team, 132)
    assert launch_config_for(sequences, 4, 132, mixed=True) == LaunchConfig(8, 132)
    assert LaunchConfig(team, 132).teams == 132 * 8 // team


@pytest.mark.parametrize(
    ("kv", "spec", "wrong"),
    [
        (PagedKv(KvLayer(cache(), None, 128)), QWEN, "the cache has no v"),
        (PagedKv(KvLayer(cache(heads=8), cache(heads=8), 128)), QWEN, "cache k: "),
        (PagedKv(KvLayer(cache(dtype=torch.float16), cache(), 128)), QWEN, "cache k: torch.float16"),
        (PagedKv(KvLayer(cache(), cache(dim=64), 64)), QWEN, "cache v: "),
        (PagedKv(KvLayer(cache(), cache()[:2], 128)), QWEN, "cache v: "),
        (PagedKv(KvLayer(cache(24), cache(24), 128)), QWEN, "scheduler.block_size = 24"),
        (PagedKv(KvLayer(cache(), cache(), 128)), replace(QWEN, heads=30), "30 query heads over 4"),
        (PagedKv(KvLayer(cache(), cache(), 128)), replace(QWEN, heads=64), "16 query heads share"),
        (PagedKv(KvLayer(cache(), cache(), 128)), replace(QWEN, window=64), "has a window"),
        (PagedKv(KvLayer(cache(), cache(), 128)), replace(QWEN, clip=8.0), "clips"),
    ],
)
def test_caches_that_it_cannot_read_are_refused(kv: PagedKv, spec: GqaSpec, wrong: str) -> None:
    with pytest.raises(InternalError, match=re.escape(wrong)):
        HopperAttention(kv, spec, torch.zeros(64, 64, 2), None)


@pytest.mark.parametrize(
    ("table", "weight", "wrong"),
    [
        (torch.zeros(64, 32, 2), torch.ones(36, 128, dtype=BF16), "rotation table: "),
        (torch.zeros(64, 64, 2), torch.ones(32, 128, dtype=BF16), "norm weight: "),
        (torch.zeros(64, 64, 2), torch.ones(36, 128), "norm weight: torch.float32"),
        (torch.zeros(64, 64, 2), torch.ones(36 * 128 + 4, dtype=BF16)[4:].view(36, 128), "norm weight: on "),
        (
            torch.zeros(64 * 128 + 2)[2:].view(64, 64, 2),
            torch.ones(36, 128, dtype=BF16),
            "rotation table: on",
        ),
        (torch.zeros(64, 64, 2, device="meta"), torch.ones(36, 128, dtype=BF16), "rotation table: on meta"),
    ],
)
def test_so_are_tables_and_norms(table: torch.Tensor, weight: torch.Tensor, wrong: str) -> None:
    kv = PagedKv(KvLayer(cache(), cache(), 128))
    with pytest.raises(InternalError, match=re.escape(wrong)):
        HopperAttention(kv, QWEN, table, HeadNorm(weight, EPS))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("slots", torch.zeros(4, dtype=torch.int64)),
        ("slots", torch.zeros(8, dtype=torch.int32)[::2]),
        ("lengths", torch.zeros(4)),
        ("blocks", torch.zeros(4, 3, dtype=torch.int64)),
        ("blocks", torch.zeros(3, 4, dtype=torch.int32).T),
    ],
)
def test_so_is_a_step_of_other_numbers(name: str, other: torch.Tensor) -> None:
    row, blocks = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32)
    singles = Singles(row, row)
    if name in ("slots", "lengths"):
        singles = replace(singles, **{name: other})
    step = StepTensors(row, row, row, row, row, blocks, row, singles, None, None, row)
    if name not in ("slots", "lengths"):
        step = replace(step, **{name: other})
    with pytest.raises(InternalError, match=f"^{name}: "):
        HopperAttentionStep(step, QWEN, ONE)
