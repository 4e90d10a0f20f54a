"""How the attention kernel for Hopper is launched; what it computes: tests/gpu/test_streamed_attention.py."""

from __future__ import annotations

import pytest

from ep_server.model.gpu.streamed_attention import Manner, manner_for


@pytest.mark.parametrize(
    ("sequences", "longest", "wanted"),
    [
        (1, 320, Manner(16, 132, 1)),
        (1, 4096, Manner(16, 132, 16)),
        (1, 1 << 20, Manner(16, 132, 33)),
        (16, 4096, Manner(16, 132, 2)),
        (32, 4096, Manner(16, 132, 1)),
        (33, 4096, Manner(16, 132, 1)),
        (34, 4096, Manner(8, 264, 1)),
        (256, 4096, Manner(8, 264, 1)),
    ],
)
def test_contexts_are_cut_where_blocks_are_few(sequences: int, longest: int, wanted: Manner) -> None:
    assert manner_for(sequences, 4, 132, longest) == wanted
