"""Puts what requests ask of sampling into their slots of the tables, out of pinned memory, without a copy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.checks import expect
from ep_server.backends.gpu.kernels.triton.early import after_previous, early
from ep_server.backends.gpu.kernels.triton.sampling_table import FLOATS, LONGS, SamplingTable

RECORD = 32  # words of an entry: its slot, a row of floats, a row of longs, then anything


@triton.jit
def _write_slots_kernel(records, floats, longs, RECORD: tl.constexpr, EARLY: tl.constexpr):
    at = tl.arange(0, RECORD)
    record = records + tl.program_id(0) * RECORD
    word, slot = tl.load(record + at), tl.load(record).to(tl.int64)
    after_previous(EARLY)
    last: tl.constexpr = 1 + FLOATS
    tl.store(floats + slot * FLOATS + at - 1, word, mask=(at >= 1) & (at < last))
    tl.store(longs + slot * LONGS * 2 + at - last, word, mask=(at >= last) & (at < last + LONGS * 2))


def write_slots(records: torch.Tensor, table: SamplingTable) -> None:
    """Fills the rows of distinct slots.

    Args:
        records: [N, RECORD] int32, on the host, pinned; floats and longs by their bits, low words first. Not
          changed by the host until the stream has passed this.
    Raises: InternalError for another shape, dtype or layout.
    """
    expect("records", records, torch.int32, (None, RECORD))
    expect("floats", table.floats, torch.float32, (None, FLOATS.value))
    expect("longs", table.longs, torch.int64, (len(table.floats), LONGS.value))
    if len(records):
        floats, longs = table.floats.view(torch.int32), table.longs.view(torch.int32)
        _write_slots_kernel[(len(records),)](
            records, floats, longs, RECORD=RECORD, **early(floats), num_warps=1
        )
