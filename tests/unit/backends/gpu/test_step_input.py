"""What a step's kernels read, against the tensors that the CPU engine makes of the same batch."""

from __future__ import annotations

import random
from dataclasses import fields
from itertools import accumulate

import pytest
import torch

from ep_server.backends.gpu.step_input import InputShape, StepInput, StepTensors, ordered, sampled_slices
from ep_server.errors import InternalError
from ep_server.models.batch import cut, split
from ep_server.records import PENDING_TOKEN, SeqSlice, StepBatch
from tests.support.triton.harness import DEVICE

SHAPE = InputShape(tokens=40, sequences=9, blocks=12, block_size=4)
ROWS = 24  # more than sequences: chunks may be among them


def batch_of(*sizes: tuple[int, int, bool], seed: int = 0) -> StepBatch:
    """(start, tokens, sample) per sequence, numbered from 7; blocks in any order, some to spare."""
    rng = random.Random(seed)
    free = list(range(200))
    rng.shuffle(free)
    slices = []
    for index, (start, count, sample) in enumerate(sizes):
        blocks = [free.pop() for _ in range(-(-(start + count) // SHAPE.block_size) + rng.randrange(2))]
        ids = [rng.randrange(1000) for _ in range(count)]
        slices.append(SeqSlice(7 + index, start, ids, blocks, sample))
    return StepBatch(tuple(slices), sum(count for _, count, _ in sizes))


@pytest.mark.parametrize(
    "batch",
    [
        batch_of((0, 5, True), (9, 1, True), (3, 1, True), (4, 7, False)),
        batch_of((9, 1, True), (3, 1, True)),
        batch_of((0, 8, False)),
        batch_of((0, 4, True), (12, 1, False)),
        batch_of((3, 1, False), (12, 1, True), (0, 2, False), (5, 1, False), (8, 1, True)),
        StepBatch((), 0),
    ],
    ids=("mixed", "decode", "chunk", "unsampled-single", "unsampled-first", "empty"),
)
def test_as_the_cpu_engine_has_it(batch: StepBatch) -> None:
    step = StepInput(SHAPE, DEVICE).fill(batch, {})
    (expected,) = split(batch, 1, SHAPE.block_size)
    at = expected.attention
    assert step.ids.tolist() == expected.token_ids.tolist()
    assert step.sources.tolist() == [-1] * len(step.ids)
    assert step.positions.tolist() == at.positions.tolist() and step.slots.tolist() == at.slots.tolist()
    assert step.lengths.tolist() == list(at.context)
    kinds_agree(step, at.num_decode, batch.num_tokens)
    if step.chunks is not None:
        assert step.chunks.query_start[at.num_decode :].tolist() == list(at.query_start[at.num_decode :])
    for row, length in enumerate(at.context):
        held = -(-length // SHAPE.block_size)
        assert step.blocks[row, :held].tolist() == at.blocks[row, :held].tolist()
    rows = list(range(step.tokens)) if step.sample_rows is None else step.sample_rows.tolist()
    assert rows == expected.sample_rows.tolist()
    assert [s.number for s in sampled_slices(batch)] == list(expected.sampled)
    assert step.live.tolist() == [batch.num_tokens]


def kinds_agree(step: StepTensors, singles: int, rows: int) -> None:
    """The kernels of single tokens and of chunks are told of all sequences once between them."""
    slots, own = step.slots.tolist(), step.singles
    padding = len(own) - singles
    assert own.lengths.tolist() == step.lengths[:singles].tolist() + [0] * padding
    assert own.slots.tolist() == slots[:singles] + [-1] * padding
    if step.chunks is None:
        assert singles == rows
        return
    assert step.chunks.slots.tolist() == [-1] * singles + slots[singles:]
    starts = step.chunks.query_start.tolist()
    assert starts[: singles + 1] == [singles] * (singles + 1)
    assert starts[-1] == rows and starts == sorted(starts)


def test_bucket_larger_than_sequences_has_room_for_chunks() -> None:
    """Where all of it lies does not depend on how many sequences run one token."""
    given, seen_at = StepInput(SHAPE, DEVICE), set[tuple[int, ...]]()
    for sizes in ([(20, 1, True)] * 8, [(5, 1, True), (3, 6, True), (0, 4, False), (7, 1, True)], []):
        batch = batch_of(*sizes)
        step, singles = given.fill(batch, {}, padded=ROWS), sum(count == 1 for _, count, _ in sizes)
        seen_at.add(tuple(x.data_ptr() for x in seen(step)))
        assert (step.tokens, len(step.lengths), len(step.singles)) == (ROWS, SHAPE.sequences, SHAPE.sequences)
        kinds_agree(step, singles, batch.num_tokens)
        chunks = [start + count for start, count, _ in sizes if count > 1]
        unused = SHAPE.sequences - len(sizes)
        assert step.lengths[singles:].tolist() == chunks + [0] * unused
        assert step.slots[batch.num_tokens :].tolist() == [-1] * (ROWS - batch.num_tokens)
        assert step.sample_rows is not None and len(step.sample_rows) == SHAPE.sequences
        rows = [row for row, piece in last_rows(batch) if piece.sample]
        assert step.sample_rows[: len(rows)].tolist() == rows and step.live.tolist() == [batch.num_tokens]
    assert len(seen_at) == 1


def last_rows(batch: StepBatch) -> list[tuple[int, SeqSlice]]:
    """Of each sequence, in the order of the rows."""
    pieces = ordered(batch)
    ends = accumulate(len(piece.token_ids) for piece in pieces)
    return [(end - 1, piece) for end, piece in zip(ends, pieces, strict=True)]


def test_rows_up_to_the_bucket_are_padding() -> None:
    given = StepInput(SHAPE, DEVICE)
    given.fill(batch_of(*[(20, 1, True)] * 8), {})  # what the memory held before
    step = given.fill(batch_of((5, 1, True), (0, 1, True)), {}, padded=4)
    assert [x.data_ptr() for x in seen(step)] == [x.data_ptr() for x in seen(given.padded(4))]
    assert (step.tokens, len(step.singles), step.chunks, step.sample_rows) == (4, 4, None, None)
    assert step.slots[2:].tolist() == [-1, -1] and step.lengths.tolist() == [6, 1, 0, 0]
    assert step.live.tolist() == [2] and step.ids[2:].tolist() == [0, 0] and step.sources.tolist() == [-1] * 4


def seen(step: StepTensors) -> list[torch.Tensor]:
    """What a captured graph reads."""
    parts = [step, step.singles, *([step.chunks] if step.chunks else [])]
    values = [getattr(part, field.name) for part in parts for field in fields(part)]
    return [value for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("before", [None, batch_of(*[(20, 1, True)] * 9)], ids=("new", "used"))
def test_padding_alone(before: StepBatch | None) -> None:
    """All rows that a captured graph may read."""
    given, rows = StepInput(SHAPE, DEVICE), SHAPE.sequences
    if before is not None:
        given.fill(before, {})
        given.fill(StepBatch((), 0), {}, padded=rows)
    step = given.padded(rows)
    assert step.slots.tolist() == step.sources.tolist() == [-1] * rows
    assert step.ids.tolist() == step.lengths.tolist() == [0] * rows and step.live.tolist() == [0]


@pytest.mark.parametrize("seed", range(3))
def test_blocks_from_step_to_step(seed: int) -> None:
    """Sequences grow, leave, change rows, are preempted, come back with other blocks."""
    rng, given, live = random.Random(seed), StepInput(SHAPE, DEVICE), dict[int, list]()
    free = list(range(500))
    for step in range(80):
        for number in [n for n, (at, _, _) in live.items() if at == 47 or rng.random() < 0.05]:
            del live[number]
        for number in range(step * 2, step * 2 + min(2, 9 - len(live))):
            live[number] = [0, 0, []]
        chosen = rng.sample(sorted(live), rng.randint(1, len(live)))
        slices = []
        for number in chosen:
            at, admission, blocks = live[number]
            if rng.random() < 0.1:  # preempted; the prefix cache may have all it had computed
                admission, blocks, at = admission + 1, [], rng.choice((0, at, at // 2))
            count = min(rng.choice((1, 1, 1, 3)), 48 - at)
            while len(blocks) * SHAPE.block_size < at + count:
                blocks.append(free[rng.randrange(len(free))])
            slices.append(SeqSlice(number, at, [1] * count, blocks, True, admission))
            live[number] = [at + count, admission, blocks]
        read = given.fill(StepBatch(tuple(slices), sum(len(s.token_ids) for s in slices)), {})
        rows = sorted(slices, key=lambda s: len(s.token_ids) != 1)
        for row, piece in enumerate(rows):
            held = -(-(piece.start + len(piece.token_ids)) // SHAPE.block_size)
            assert read.blocks[row, :held].tolist() == piece.blocks[:held]


def test_the_same_request_from_its_start_with_other_blocks() -> None:
    """As in tests and benchmarks, which have no scheduler that counts admissions."""
    given = StepInput(SHAPE, DEVICE)
    for seed in (1, 2):
        batch = batch_of((0, 6, True), seed=seed)
        assert given.fill(batch, {}).blocks[0, :2].tolist() == list(batch.slices[0].blocks[:2])


def test_a_slice_with_too_few_blocks_is_refused() -> None:
    with pytest.raises(InternalError, match="request 3: 9 tokens in 2 blocks"):
        StepInput(SHAPE, DEVICE).fill(StepBatch((SeqSlice(3, 8, [1], [4, 5], True),), 1), {})


def test_a_chunk_with_a_token_in_flight_is_refused() -> None:
    batch = StepBatch((SeqSlice(3, 0, [5, PENDING_TOKEN], [4], True),), 2)
    with pytest.raises(InternalError, match="request 3 goes on"):
        StepInput(SHAPE, DEVICE).fill(batch, {3: 0})


def test_a_token_in_flight_is_named_by_its_place() -> None:
    (piece,) = batch_of((6, 1, True)).slices
    batch = StepBatch((SeqSlice(piece.number, 6, [PENDING_TOKEN], piece.blocks, True),), 1)
    assert StepInput(SHAPE, DEVICE).fill(batch, {7: 3}).sources.tolist() == [3]
    with pytest.raises(InternalError, match="request 7 goes on with a token that the last step did not draw"):
        StepInput(SHAPE, DEVICE).fill(batch, {8: 3})


@pytest.mark.parametrize(
    "batch",
    [batch_of(*[(0, 1, True)] * 5), batch_of((0, 2, True))],
    ids=("too-many", "chunk"),
)
def test_a_bucket_is_of_single_tokens(batch: StepBatch) -> None:
    with pytest.raises(InternalError, match="is not one of 4 rows"):
        StepInput(SHAPE, DEVICE).fill(batch, {}, padded=4)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_sampled_rows_come_first_in_a_bucket_of_single_tokens(micro_batches: int) -> None:
    batch = batch_of((3, 1, False), (12, 1, True), (5, 1, False), (8, 1, True))
    sizes = [4] if micro_batches == 1 else [2, 2]
    parts = cut(batch, micro_batches, sizes[0])
    rows = []
    for part, size in zip(parts, sizes, strict=True):
        step = StepInput(SHAPE, DEVICE).fill(part, {}, padded=size)
        assert step.sample_rows is None
        rows += step.positions.tolist()
    sampled = [piece for part in parts for piece in sampled_slices(part)]
    assert rows[: len(sampled)] == [piece.start for piece in sampled] == [12, 8]


@pytest.mark.parametrize(
    "batch", [batch_of((0, 41, True)), batch_of(*[(0, 1, True)] * 10), batch_of((48, 1, True))]
)
def test_a_step_beyond_the_shape_is_refused(batch: StepBatch) -> None:
    with pytest.raises(InternalError):
        StepInput(SHAPE, DEVICE).fill(batch, {})
