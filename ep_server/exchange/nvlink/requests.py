"""What passes between the halves on GPUs, what a call asks of the kernels, and what kernels report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from ep_server import _cuda
from ep_server.errors import (
    GroupAborted,
    HookNotCalled,
    InternalError,
    InvalidArgument,
    PeerTimeout,
    ProtocolViolation,
)
from ep_server.exchange.api import AddNorm, ExchangeSpec, Reduction, View
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


@dataclass(slots=True)
class Handle:
    """What a dispatch leaves for the halves after it.

    memory: device bytes that csrc calls DeviceHandle; stream: on which they were allocated.
    most: tokens that any rank sends, as far as is known: kernels are launched with blocks for so many.
    rows: of the view, -1 where only the device knows.
    answering: a combine of it was sent and not received; the memory has room for the state of one.
    generation: the launcher's when it was made.
    src_info, layout_range: DeepEP's handle, where asked for.
    """

    memory: torch.Tensor
    tokens: int
    weighted: bool
    most: int
    rows: int = -1
    stream: int = 0
    received: bool = False
    held: bool = False
    answering: bool = False
    src_info: torch.Tensor | None = None
    layout_range: torch.Tensor | None = None
    generation: object = None


class DeviceBytes:
    """Device memory that the exchange owns, as other libraries understand it."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def raise_status(status: tuple[int, str, str, int, int, int, int], spec: ExchangeSpec) -> None:
    """Raises what (code, op, phase, rank, peer, expected, seen) of csrc/exchange/common/status.hpp means."""
    code, op, phase, rank, peer, expected, seen = status
    where = f"{op}/{phase}, rank {rank}, peer {peer}, expected epoch {expected}, saw {seen}"
    if code == _cuda.BAD_IDS:
        allowed = f"-1 to {spec.num_experts - 1}, distinct within its token"
        raise InvalidArgument(f"topk_ids[{expected}, {seen}]", "refused by the kernel", allowed)
    if code == _cuda.CAPACITY:
        raise InvalidArgument("capacity", expected, f"enough for the rows that came: row {seen} did not fit")
    if code == 1:
        raise PeerTimeout(op, phase, rank, peer, expected, seen)
    if code == 2:
        raise HookNotCalled(
            f"rank {rank}: {op} takes the bank of epoch {expected}, which was not received here"
        )
    if code == 3:
        raise ProtocolViolation(f"a cell is newer than expected or invalid: {where}")
    if code == 4:
        raise GroupAborted(f"the group was aborted after an error in {where}")
    raise InternalError(f"unexpected status {code}: {where}")
