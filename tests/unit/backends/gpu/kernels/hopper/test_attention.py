"""How the attention kernel for Hopper is launched; its results need one (tests/gpu)."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_server.backends.gpu import capability
from ep_server.backends.gpu.graphs import buckets_up_to
from ep_server.backends.gpu.kernels.hopper.attention import (
    HopperAttention,
    HopperAttentionStep,
    LaunchConfig,
    launch_config_for,
)
from ep_server.backends.gpu.kernels.triton.launch import block
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


def step_of(table: torch.Tensor, count: int, strides: tuple[int, int]) -> StepTensors:
    """Tables of three blocks that lie in `table`."""
    row = torch.zeros(count, dtype=torch.int32)
    blocks = table.as_strided((count, 3), strides)
    return StepTensors(row, row, row, row, row, blocks, row, Singles(row, row), None, None, row)


@pytest.mark.parametrize(
    ("sequences", "longest", "wanted"),
    [
        (1, 320, LaunchConfig(8, 132, 1)),
        (1, 4096, LaunchConfig(8, 132, 16)),
        (1, 1 << 20, LaunchConfig(8, 132, 32)),
        (3, 4096, LaunchConfig(8, 132, 8)),
        (16, 4096, LaunchConfig(8, 132, 2)),
        (32, 4096, LaunchConfig(8, 132, 1)),
        (33, 4096, LaunchConfig(8, 132, 1)),
        (34, 4096, LaunchConfig(4, 132, 1)),
        (66, 4096, LaunchConfig(4, 132, 1)),
        (67, 4096, LaunchConfig(2, 132, 1)),
        (133, 4096, LaunchConfig(1, 132, 1)),
        (256, 4096, LaunchConfig(1, 132, 1)),
    ],
)
def test_contexts_are_cut_where_blocks_are_few(sequences: int, longest: int, wanted: LaunchConfig) -> None:
    assert launch_config_for(sequences, 4, 132, longest) == wanted
    assert launch_config_for(sequences, 4, 132, longest, mixed=True) == replace(wanted, team=8)


@pytest.mark.parametrize("longest", [320, 4096, 40960, 1 << 20])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("num_sms", [78, 114, 132])
def test_any_number_of_sequences_is_cut_as_some_bucket_is(num_sms: int, kv_heads: int, longest: int) -> None:
    """Beside prompts there may be any number; what joins the parts is compiled for those of the buckets."""
    for most in (3, 24, 200):
        at_start = {launch_config_for(n, kv_heads, num_sms, longest).splits for n in buckets_up_to(most)}
        later = {launch_config_for(n, kv_heads, num_sms, longest).splits for n in range(1, most + 1)}
        assert {block(splits) for splits in later} == {block(splits) for splits in at_start}


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
        ("positions", torch.zeros(8, dtype=torch.int32)[::2]),
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
        HopperAttentionStep(step, 32, ONE)


@pytest.mark.parametrize(
    ("count", "strides", "pitch"), [(4, (3, 1), 3), (4, (5, 1), 5), (1, (1, 1), 3), (1, (7, 1), 3)]
)
def test_all_of_a_tables_row_may_be_read(
    monkeypatch: pytest.MonkeyPatch, count: int, strides: tuple[int, int], pitch: int
) -> None:
    """A single row has any stride, and nothing behind it need be memory."""
    native = SimpleNamespace(AttentionWork=dict, AttentionLaunchConfig=dict)
    monkeypatch.setattr(capability, "import_module", lambda _: native)
    work: Any = HopperAttentionStep(step_of(torch.zeros(20, dtype=torch.int32), count, strides), 32, ONE).work
    assert work["blocks_pitch"] == pitch and work["count"] == count


def test_rows_of_a_table_that_overlap_are_refused() -> None:
    step = step_of(torch.zeros(20, dtype=torch.int32), 4, (2, 1))
    with pytest.raises(InternalError, match="blocks: 2 entries from row to row, must be 3 or more"):
        HopperAttentionStep(step, 32, ONE)
