"""The prompts that a rank runs before it is ready: every number of rows that a step may have."""

from __future__ import annotations

import pytest

from ep_server.backends.gpu.step_input import InputShape, prompts_of

SHAPE = InputShape(tokens=512, sequences=6, blocks=7, block_size=16)  # sequences of up to 112 positions


@pytest.mark.parametrize(
    ("rows", "cached", "sizes"),
    [
        (1, 4096, [1]),
        (112, 4096, [112]),
        (113, 4096, [112, 1]),
        (512, 4096, [112, 112, 112, 112, 64]),
        (5000, 4096, [112] * 6),  # no more sequences than a step has
        (512, 9, [112, 32]),  # no more blocks than there are
        (512, 3, [48]),
    ],
)
def test_sizes(rows: int, cached: int, sizes: list[int]) -> None:
    batch = prompts_of(rows, SHAPE, cached, max_context=112)
    assert [len(piece.token_ids) for piece in batch.slices] == sizes
    assert batch.num_tokens == sum(sizes)


def test_none_is_longer_than_a_sequence_may_be() -> None:
    """Which may end inside a block: no position beyond it has a rotation."""
    batch = prompts_of(512, SHAPE, 4096, max_context=100)
    assert [len(piece.token_ids) for piece in batch.slices] == [100] * 5 + [12]


@pytest.mark.parametrize("cached", [3, 9, 4096])
def test_each_has_blocks_of_its_own(cached: int) -> None:
    for rows in range(1, 513, 7):
        pieces = prompts_of(rows, SHAPE, cached, max_context=105).slices
        taken = [block for piece in pieces for block in piece.blocks]
        assert len(set(taken)) == len(taken) and max(taken) < cached
        assert all(len(piece.blocks) == -(-len(piece.token_ids) // 16) for piece in pieces)
        assert len({piece.number for piece in pieces}) == len(pieces)
