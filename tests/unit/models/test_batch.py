"""A step's slices become rows: nothing lost, cut fairly, positions and slots where the blocks say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_server.backends.gpu.graphs import sizes_of
from ep_server.backends.gpu.runner import MOST_MICRO_BATCHES
from ep_server.models.batch import cut, split
from ep_server.records import SeqSlice, StepBatch

BLOCK = 4


def token(number: int, position: int) -> int:
    return number * 1000 + position


def sequence(number: int, start: int, length: int, sample: bool = True) -> SeqSlice:
    """Tokens encode (sequence, position); block b of sequence n is 100 * n + b."""
    blocks = [100 * number + b for b in range(-(-(start + length) // BLOCK) + 1)]  # one more than needed
    return SeqSlice(number, start, [token(number, start + i) for i in range(length)], blocks, sample)


def batch_of(slices: list[SeqSlice]) -> StepBatch:
    return StepBatch(tuple(slices), sum(len(s.token_ids) for s in slices))


lengths = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.booleans()), max_size=6)


@given(lengths, st.integers(1, 4))
def test_every_token_runs_once_at_its_place(items: list[tuple[int, int, bool]], count: int) -> None:
    slices = [sequence(i + 1, start, n, sample) for i, (start, n, sample) in enumerate(items)]
    parts = split(batch_of(slices), count, BLOCK)
    assert len(parts) == count
    fair = -(-sum(n for _, n, _ in items) // count)
    last: dict[int, int] = {}
    for part in parts:
        meta = part.attention
        ids = part.token_ids.tolist()
        assert len(ids) <= fair
        assert meta.query_start[0] == 0 and meta.query_start[-1] == len(ids)
        assert meta.num_decode <= len(meta.context)
        for i, context in enumerate(meta.context):
            a, b = meta.query_start[i : i + 2]
            number = ids[a] // 1000
            positions = [t % 1000 for t in ids[a:b]]
            assert meta.positions[a:b].tolist() == positions == list(range(context - (b - a), context))
            assert (b - a == 1) == (i < meta.num_decode)
            slots = [(100 * number + p // BLOCK) * BLOCK + p % BLOCK for p in positions]
            assert meta.slots[a:b].tolist() == slots
            used = -(-context // BLOCK)
            table = meta.blocks[i].tolist()
            assert table == [100 * number + j for j in range(used)] + [0] * (len(table) - used)
            assert positions[0] == last.get(number, items[number - 1][0] - 1) + 1  # earlier parts first
            last[number] = positions[-1]
    assert last == {i + 1: start + n - 1 for i, (start, n, _) in enumerate(items)}
    drawn = [
        (number, int(part.token_ids[row]))
        for part in parts
        for number, row in zip(part.sampled, part.sample_rows.tolist(), strict=True)
    ]
    assert sorted(drawn) == [
        (i + 1, token(i + 1, start + n - 1)) for i, (start, n, sample) in enumerate(items) if sample
    ]


def test_nothing_to_run() -> None:
    for part in split(StepBatch((), 0), 2, BLOCK):
        assert part.token_ids.shape == part.attention.slots.shape == (0,)
        assert part.attention.blocks.shape == (0, 0)
        assert part.attention.query_start == (0,)
        assert part.sampled == ()


@pytest.mark.parametrize("count", [1, 2])
def test_decoding_sequences_come_first(count: int) -> None:
    parts = split(batch_of([sequence(1, 0, 6), sequence(2, 9, 1), sequence(3, 5, 1)]), count, BLOCK)
    assert parts[0].token_ids[:2].tolist() == [2009, 3005]
    assert parts[0].attention.num_decode == 2
    assert [len(part.token_ids) for part in parts] == ([8] if count == 1 else [4, 4])


@given(st.integers(0, 20), st.integers(1, MOST_MICRO_BATCHES), st.integers(0, 9))
def test_rows_of_a_bucket_fill_one_micro_batch_after_the_other(rows: int, count: int, padding: int) -> None:
    sizes = sizes_of(rows + padding, count)
    assert sum(sizes) == rows + padding and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes)[::-1]
    slices = [sequence(i + 1, 3, 1) for i in range(rows)]
    parts = cut(batch_of(slices), count, sizes[0])
    assert len(parts) == count and [s for part in parts for s in part.slices] == slices
    left = rows
    for part, size in zip(parts, sizes, strict=True):
        assert part.num_tokens == len(part.slices) == min(left, size)
        left -= part.num_tokens


def test_what_is_too_much_is_left_in_the_last_part() -> None:
    slices = [sequence(1, 0, 1), sequence(2, 0, 7)]
    assert [part.num_tokens for part in cut(batch_of(slices), 2, 3)] == [3, 5]
    assert cut(batch_of(slices), 1, 3) == [batch_of(slices)]
