from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.step_words import Packed, room_for, spread
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE

LEFT = -77


def host(count: int) -> torch.Tensor:
    words = torch.arange(room_for(count), dtype=torch.int32)
    return words if DEVICE.type == "cpu" else words.pin_memory()


def room(*shape: int) -> torch.Tensor:
    return torch.full(shape, LEFT, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("rows", "count", "width"),
    [(1, 0, 0), (1, 1, 1), (5, 3, 7), (8, 4, 0), (300, 9, 150)],  # the last one in several programs
)
def test_words_come_where_they_are_read(rows: int, count: int, width: int) -> None:
    """What lies beyond stays as it was."""
    words, columns, tables = host(3 * rows + count * width), room(3, 320), room(9, 160)
    spread(Packed(words, rows, count, width), columns, tables)
    end = 3 * rows + count * width
    given, entries = words[: 3 * rows].view(3, rows), words[3 * rows : end].view(count, width)
    assert torch.equal(columns[:, :rows].cpu(), given) and bool((columns[:, rows:] == LEFT).all())
    assert torch.equal(tables[:count, :width].cpu(), entries)
    assert bool((tables[count:] == LEFT).all()) and bool((tables[:, width:] == LEFT).all())


@pytest.mark.parametrize(("rows", "count", "width"), [(0, 1, 1), (5, 1, 1), (4, 3, 1), (4, 2, 7)], ids=str)
def test_more_than_there_is_room_for(rows: int, count: int, width: int) -> None:
    with pytest.raises(InternalError, match=r"must be at least 1, 0, 0 and at most \(4, 2, 6\)"):
        spread(Packed(host(3 * rows + count * width), rows, count, width), room(3, 4), room(2, 6))


def test_wrong_inputs_are_named() -> None:
    columns, tables, packed = room(3, 4), room(2, 6), Packed(host(14), 4, 1, 2)
    with pytest.raises(InternalError, match=r"words: torch.int32 \[14\].*\[1024\]"):
        spread(Packed(host(14)[:14], 4, 1, 2), columns, tables)
    with pytest.raises(InternalError, match=r"columns: .*strides"):
        spread(packed, room(3, 9)[:, :4], tables)
    with pytest.raises(InternalError, match=r"tables: torch.int64"):
        spread(packed, columns, tables.long())
