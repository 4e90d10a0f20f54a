from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.sampling_table import RECORD, SamplingTable, write_slots
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE

SLOTS = 6


def table() -> SamplingTable:
    made = SamplingTable.of(SLOTS, 40, DEVICE)
    made.floats.fill_(-1.5)
    made.longs.fill_(-7)
    return made


@pytest.mark.parametrize("slots", [[], [4], [5, 0, 3]], ids=str)
def test_rows_come_into_their_slots(slots: list[int]) -> None:
    """Bit by bit: long numbers, infinity; other slots keep what they had."""
    generator, count = torch.Generator().manual_seed(1), len(slots)
    floats = torch.randn(count, 8, generator=generator)
    longs = torch.randint(-(1 << 62), 1 << 62, (count, 8), generator=generator)
    floats[:, 2] = float("inf")
    records = torch.full((count, RECORD), 77, dtype=torch.int32)
    records[:, 0] = torch.tensor(slots, dtype=torch.int32)
    records[:, 1:9], records[:, 9:25] = floats.view(torch.int32), longs.view(torch.int32)
    got, expected = table(), table()
    place = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    expected.floats.index_copy_(0, place, floats.to(DEVICE))
    expected.longs.index_copy_(0, place, longs.to(DEVICE))
    write_slots(records if DEVICE.type == "cpu" else records.pin_memory(), got)
    assert torch.equal(got.floats, expected.floats) and torch.equal(got.longs, expected.longs)


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(InternalError, match=r"records: .*any, 32"):
        write_slots(torch.zeros(2, 25, dtype=torch.int32), table())
    with pytest.raises(InternalError, match=r"records: torch\.int64"):
        write_slots(torch.zeros(2, RECORD, dtype=torch.int64), table())
