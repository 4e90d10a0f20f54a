"""When chunks attend to expanded latents, what memory that takes, and which blocks a step's kernels read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ep_server.backends.gpu import assembly
from ep_server.backends.gpu.assembly import GpuPlan, copy_rule_of, kv_blocks_on
from ep_server.backends.gpu.chunk_copies import HOPPER_FLOPS, MOST_BYTES, distinct_blocks
from ep_server.backends.gpu.expansion import ABSORBED_FLOPS, PRODUCT_FLOPS, Expansion
from ep_server.backends.gpu.kernels.triton.expand import TILE
from ep_server.backends.gpu.memory import KV_SHARE, Room
from ep_server.backends.gpu.step_input import InputShape, StepInput
from ep_server.models.families.spec import MlaSpec
from ep_server.records import SeqSlice, StepBatch
from tests.support.triton.harness import DEVICE

GIB = 1 << 30
LITE, V3 = MlaSpec(16, 0, 512, 128, 64, 128, 0.1), MlaSpec(128, 1536, 512, 128, 64, 128, 0.1)
RULES = [Expansion.of(spec, 16, 10**6, 132) for spec in (LITE, V3)]
SHAPE = InputShape(tokens=600, sequences=6, blocks=40, block_size=16)
SMALL = Expansion(LITE, 16, 5, 132)


def pays(rule: Expansion, *chunks: tuple[int, int]) -> bool:
    """chunks: (tokens, tokens before them), which share no block."""
    tokens, past = np.array(chunks).T
    return rule.pays(tokens, tokens + past, int((-(-(tokens + past) // TILE)).sum()))


@pytest.mark.parametrize("rule", RULES, ids=("16 heads", "128 heads"))
def test_many_tokens_behind_any_context_pay(rule: Expansion) -> None:
    assert pays(rule, (8192, 0)) and pays(rule, (8192, 24576)) and pays(rule, (2048, 0))
    assert pays(rule, (256, 4096)) and pays(rule, *[(64, 8192)] * 8) and pays(rule, *[(256, 0)] * 8)


@pytest.mark.parametrize("rule", RULES, ids=("16 heads", "128 heads"))
def test_few_tokens_behind_long_contexts_are_absorbed(rule: Expansion) -> None:
    assert not pays(rule, *[(16, 8192)] * 64) and not pays(rule, *[(24, 8192)] * 64)
    assert not pays(rule, (2, 0)) and not pays(rule, (100, 0))


def test_few_tokens_and_heads_leave_multiprocessors_to_ours() -> None:
    lite, v3 = RULES
    assert pays(lite, (12, 4096)) and not pays(v3, (12, 4096))


@pytest.mark.parametrize("rule", RULES, ids=("16 heads", "128 heads"))
@pytest.mark.parametrize("context", [1024, 4096, 24576])
def test_rule_follows_its_rates_on_a_full_gpu(rule: Expansion, context: int) -> None:
    """Per position and head: an expansion and a padded tile, or 2,176 FLOP for each query."""
    position = 262_144 / PRODUCT_FLOPS + 128 * 640 / HOPPER_FLOPS
    least = position / (2_176 / ABSORBED_FLOPS)
    assert 29 < least < 30
    assert not pays(rule, *[(28, context - 28)] * 512) and pays(rule, *[(32, context - 32)] * 512)


def test_tiles_that_chunks_share_pay_earlier() -> None:
    tokens = np.full(64, 24)
    contexts = tokens + 8192
    for rule in RULES:
        assert not rule.pays(tokens, contexts, 64 * 65) and rule.pays(tokens, contexts, 64 + 64)


def test_scratch_memory_has_a_bound() -> None:
    for rule in RULES:
        assert rule.heads == 16 and rule.blocks == 504  # 64,512 positions
        assert rule.nbytes == 504 * TILE * (16 * 256 + 64) * 2 <= MOST_BYTES < rule.nbytes + rule.tile_bytes
    assert Expansion.of(MlaSpec(40, 0, 512, 128, 64, 128, 0.1), 16, 9, 132).heads == 10


def model_of(spec: MlaSpec, context: int) -> Any:
    """What a plan reads of a loaded model."""
    return SimpleNamespace(
        spec=SimpleNamespace(attention=spec),
        max_context=context,
        compute=SimpleNamespace(device=torch.device("cuda")),
        weights=SimpleNamespace(nbytes=10 * GIB),
        kv_block_bytes=lambda size: size * 1000 * 1152,
    )


def test_scratch_memory_is_part_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the longest context and a step of other prompts; the cache gets what is left."""
    monkeypatch.setattr(assembly, "sm_count", lambda device: 132)
    monkeypatch.setattr(Room, "on", lambda device: Room("cuda:0", 20 * GIB, 80 * GIB))
    device, model = torch.device("cuda"), model_of(LITE, 32_000)
    plan = GpuPlan(0, 16, 64, 4096, useful_blocks=10**6, copies=True)
    rule = copy_rule_of(model, plan)
    assert rule is not None and rule.blocks == 250 + 32 and rule.nbytes == 282 * TILE * 8320
    assert kv_blocks_on(device, model, plan) == int((20 * GIB - rule.nbytes) * KV_SHARE / (16 * 1000 * 1152))
    few = copy_rule_of(model, GpuPlan(100, 16, 64, 4096, useful_blocks=10**6, copies=True))
    assert few is not None and few.blocks == 13  # as many as 1,600 positions of a cache can fill
    assert copy_rule_of(model, GpuPlan(0, 16, 64, 4096, useful_blocks=10**6)) is None


@pytest.mark.parametrize("seed", range(4))
def test_tables_of_tiles_name_the_same_blocks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    held = rng.integers(1, 20, size=seed + 1)
    tables = np.stack([rng.permutation(60)[:21] for _ in held]).astype(np.int32)
    tables[:, :9] = tables[0, :9]
    blocks, places = distinct_blocks(tables, held, 4)
    runs = -(-held // 4)
    assert places.shape == (len(held), runs.max())
    tiles = blocks.reshape(-1, 4)
    assert len({tuple(tile) for tile in tiles.tolist()}) == len(tiles)
    for row, copied, count, tiles_held in zip(tables, places, held, runs, strict=True):
        named = tiles[copied[:tiles_held]].reshape(-1)
        assert named[:count].tolist() == row[:count].tolist() and not named[count:].any()
        assert not copied[tiles_held:].any()


def test_chunks_that_share_tiles_expand_them_once() -> None:
    given = StepInput(SHAPE, DEVICE, copies=SMALL)
    prefix = tuple(range(50, 66))  # two tiles
    slices = [
        SeqSlice(0, 256, (0,) * 90, (*prefix, *range(6)), True),
        SeqSlice(1, 300, (0,), tuple(range(70, 89)), True),
        SeqSlice(2, 256, (0,) * 130, (*prefix, *range(10, 19)), True),
    ]
    step = given.fill(StepBatch(tuple(slices), 221), {}, copy=True)
    assert step.copied and step.chunks is not None and step.chunks.copied is not None
    copy = step.chunks.copied
    assert copy.count.tolist() == [5] and len(copy.blocks) == 5 * 8
    tiles = copy.blocks.view(5, 8)
    for row, held in ((1, slices[0].blocks), (2, slices[2].blocks)):
        named = tiles[copy.tables[row, : -(-len(held) // 8)].long()].flatten()
        assert named[: len(held)].tolist() == list(held)


def test_contexts_that_do_not_fit_are_absorbed() -> None:
    given = StepInput(SHAPE, DEVICE, copies=SMALL)
    long = SeqSlice(0, 500, (0,) * 100, tuple(range(38)), True)
    assert given.fill(StepBatch((long,), 100), {}, copy=True).copied
    more = SeqSlice(1, 0, (0,) * 2, (39,), True)
    assert not given.fill(StepBatch((long, more), 102), {}, copy=True).copied
