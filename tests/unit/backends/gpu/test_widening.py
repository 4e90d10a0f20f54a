"""When a copy of an FP8 cache pays, how large it is, and what of it a step's kernels read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ep_server.backends.gpu import chunk_copies
from ep_server.backends.gpu.chunk_copies import HOPPER_FLOPS, MOST_BYTES, distinct_blocks
from ep_server.backends.gpu.step_input import InputShape, StepInput, StepTensors
from ep_server.backends.gpu.widening import COPY_BYTES, TRITON_FLOPS, Widening
from ep_server.models.families.spec import GqaSpec
from ep_server.records import SeqSlice, StepBatch
from tests.support.triton.harness import DEVICE

QWEN = Widening.of(GqaSpec(32, 4, 128, 0.1), 16, 10_000, 132)
SHAPE = InputShape(tokens=64, sequences=6, blocks=12, block_size=4)
SMALL = Widening(8, 2, 128, SHAPE.block_size, 14, 132)


def pays(*chunks: tuple[int, int], rule: Widening = QWEN) -> bool:
    """chunks: (tokens, tokens before them), which share no block."""
    tokens, past = np.array(chunks).T
    blocks = int((-(-(tokens + past) // rule.block_size)).sum())
    return rule.pays(tokens, tokens + past, blocks)


def test_large_chunks_pay() -> None:
    assert pays((8192, 24576)) and pays((2048, 0)) and pays((512, 16384)) and pays((256, 1000))


def test_many_short_chunks_behind_long_contexts_pay_late() -> None:
    """From 263 FLOP for a byte copied, see pays()."""
    assert not pays(*[(16, 8192)] * 64) and not pays(*[(32, 8192)] * 64)
    assert pays(*[(64, 8192)] * 64) and pays(*[(128, 8192)] * 64)


def test_few_tiles_of_rows_pay_earlier() -> None:
    """Triton's kernel leaves multiprocessors idle; the other cuts the context into parts."""
    assert pays((16, 16384)) and pays((33, 16384))


def test_short_prompts_do_not_pay() -> None:
    """What the launch takes is more than what it saves."""
    assert not pays((2, 0)) and not pays((16, 100)) and not pays((64, 0))


def test_shared_blocks_pay_earlier() -> None:
    tokens = np.full(64, 16)
    contexts = tokens + 8192
    assert not QWEN.pays(tokens, contexts, 64 * 513) and QWEN.pays(tokens, contexts, 512 + 64)


@pytest.mark.parametrize("heads", [(32, 4), (32, 8), (8, 8), (64, 1)])
@pytest.mark.parametrize("context", [300, 4096, 100_000])
def test_a_copy_is_small_beside_the_attention_it_is_for(heads: tuple[int, int], context: int) -> None:
    """The bound that pays() names, where the GPU is full."""
    rule = Widening(*heads, 128, 16, 100_000, 132)
    least = 1 / (COPY_BYTES * (1 / TRITON_FLOPS - 1 / HOPPER_FLOPS))
    assert 262 < least < 263
    for tokens in (8, 16, 32, 64, 128, 256):
        blocks = -(-context // 16)
        many = np.full(512, tokens)
        if tokens < context and rule.pays(many, np.full(512, context), 512 * blocks):
            rows = -(-tokens * (heads[0] // heads[1]) // 64) * 64
            flops = rows * heads[1] * 128 * 4 * (context - tokens / 2)
            assert flops / (blocks * rule.block_bytes * 1.5) >= least


def test_scratch_memory_has_a_bound() -> None:
    assert QWEN.blocks == 10_000 and QWEN.nbytes == 10_000 * 16 * 4 * 128 * 4
    wide = Widening.of(GqaSpec(64, 8, 128, 0.1), 16, 1 << 20, 132)
    assert wide.nbytes == MOST_BYTES and wide.blocks * wide.block_size == 131_072


@pytest.mark.parametrize("seed", range(4))
def test_tables_of_the_copy_name_the_same_blocks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    held = rng.integers(1, 9, size=seed + 1)
    tables = np.stack([rng.permutation(40)[:11] for _ in held]).astype(np.int32)
    tables[:, :2] = tables[0, :2]
    blocks, places = distinct_blocks(tables, held)
    assert sorted(set(blocks.tolist())) == sorted(blocks.tolist())
    assert places.shape == (len(held), held.max())
    used = {int(block) for row, count in zip(tables, held, strict=True) for block in row[:count]}
    assert used == set(blocks.tolist())
    for row, copied, count in zip(tables, places, held, strict=True):
        assert blocks[copied[:count]].tolist() == row[:count].tolist() and not copied[count:].any()


def batch_of(*pieces: tuple[int, int, list[int]]) -> StepBatch:
    """(start, tokens, blocks) of each sequence."""
    slices = tuple(SeqSlice(n, at, (0,) * count, held, True) for n, (at, count, held) in enumerate(pieces))
    return StepBatch(slices, sum(count for _, count, _ in pieces))


def copied(step: StepTensors, row: int, blocks: int) -> list[int]:
    """The blocks of the cache that a row's table stands for."""
    assert step.chunks is not None and step.chunks.copied is not None
    copy = step.chunks.copied
    named = copy.blocks[: copy.count[0]].tolist()
    assert len(set(named)) == len(named)
    return [named[place] for place in copy.tables[row, :blocks].tolist()]


@pytest.mark.parametrize("padded", [0, 40])
def test_chunks_that_share_a_prefix_copy_it_once(padded: int) -> None:
    """A single token between them needs no copy."""
    given = StepInput(SHAPE, DEVICE, copies=SMALL)
    batch = batch_of((16, 7, [50, 3, 9, 40, 7, 8]), (9, 1, [30, 31, 32]), (12, 9, [50, 3, 9, 2, 1, 0]))
    step = given.fill(batch, {}, padded, copy=True)
    assert step.copied and step.chunks is not None and step.chunks.copied is not None
    assert step.chunks.copied.count.tolist() == [9]
    assert copied(step, 1, 6) == [50, 3, 9, 40, 7, 8] and copied(step, 2, 6) == [50, 3, 9, 2, 1, 0]
    assert len(step.chunks.copied.tables) == len(step.lengths)


def test_steps_in_turn_use_the_same_addresses() -> None:
    given, addresses = StepInput(SHAPE, DEVICE, staging=2, copies=SMALL), set()
    for first in range(5):
        step = given.fill(batch_of((0, 9, [first, 40 - first, 20])), {}, 40, copy=True)
        assert copied(step, 0, 3) == [first, 40 - first, 20]
        assert step.chunks is not None and step.chunks.copied is not None
        copy = step.chunks.copied
        addresses.add((copy.blocks.data_ptr(), copy.count.data_ptr(), copy.tables.data_ptr()))
    again = given.padded(40, copied=True).chunks
    assert again is not None and again.copied is not None
    addresses.add(tuple(x.data_ptr() for x in (again.copied.blocks, again.copied.count, again.copied.tables)))
    assert len(addresses) == 1


def test_steps_without_a_copy() -> None:
    """Contexts that do not fit, no chunk, none wanted, or none that pays."""
    given = StepInput(SHAPE, DEVICE, copies=SMALL)
    long = batch_of((16, 20, list(range(9))), (20, 4, list(range(20, 26))))
    assert not given.fill(long, {}, copy=True).copied
    assert given.fill(batch_of((16, 20, list(range(9))), (20, 2, list(range(4, 10)))), {}, copy=True).copied
    assert not given.fill(batch_of((9, 1, [1, 2, 3])), {}, copy=True).copied
    assert not given.fill(StepBatch((), 0), {}, 40, copy=True).copied
    assert not given.fill(batch_of((0, 9, [1, 2, 3])), {}).copied
    assert not StepInput(SHAPE, DEVICE).fill(batch_of((0, 9, [1, 2, 3])), {}, copy=True).copied
    everything = replace(SMALL, num_sms=10**9)  # Triton's kernel fills a billionth of it
    assert StepInput(SHAPE, DEVICE, copies=everything).fill(batch_of((0, 9, [1, 2, 3])), {}).copied


def test_runs_with_the_same_number_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only their first blocks count in it here, which they share."""
    monkeypatch.setattr(chunk_copies, "MIX", np.int64(0))
    tables = np.array([[5, 6, 7, 8], [5, 9, 7, 8], [5, 6, 7, 8]])
    blocks, places = distinct_blocks(tables, np.full(3, 4), together=2)
    assert blocks.reshape(-1, 2)[places].reshape(3, 4).tolist() == tables.tolist()
    assert len(blocks) == 2 * 3
