"""What a call asks of the kernels: how rows travel, what is filled. Records; nothing is checked here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from ep_server.exchange.api import AddNorm, Reduction, View
from ep_server.exchange.views import Tensors


class Wire(StrEnum):
    """How the rows of a combine travel. The order is that of csrc/exchange/nvlink/state.hpp."""

    BF16 = "bf16"
    FP8 = "fp8"  # e4m3, one float32 scale per 128 channels
    LOG10 = "log10"  # sign and 9 bits of logarithm, a range per 128 channels


@dataclass(frozen=True, slots=True)
class CombineMode:
    """What all ranks must say alike of a combine."""

    reduction: Reduction
    wire: Wire


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the receive of a dispatch fills. None = made by the exchange, or not wanted.

    out: rows and scales of an earlier empty_padded(), PADDED only. counts: [E_local] int32.
    capacity: rows of a COMPACT or INDEX view; None = as many as can come.
    source_map: the handle's src_info and layout_range are filled, PADDED only.
    most_tokens: of any rank, as far as the caller knows, else max_tokens: kernels get blocks for so many.
      More are served too, and slower.
    expert_stats: [E_local] int32, += rows received. wait_stats: [R] int64, += ns waited for each rank.
    next_reads_ahead: the stream's next kernel may be set up at once; until it waits for this one it must
      touch nothing that this one or an earlier one writes.
    """

    view: View
    out: Tensors | None = None
    counts: torch.Tensor | None = None
    capacity: int | None = None
    source_map: bool = False
    expert_stats: torch.Tensor | None = None
    wait_stats: torch.Tensor | None = None
    most_tokens: int | None = None
    next_reads_ahead: bool = False


@dataclass(slots=True)
class CombineTensors:
    """What a combine reads and fills; None in the half that does not.

    expert_out: as the view of the dispatch has it. weights: [T, K] float32. out: [T, H] bfloat16.
    wait_stats: [R] int64, += ns waited for each rank. next_reads_ahead: see Receipt.
    add_norm: out is what that says, not the sums.
    """

    expert_out: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    out: torch.Tensor | None = None
    wait_stats: torch.Tensor | None = None
    next_reads_ahead: bool = False
    add_norm: AddNorm | None = None
