"""What passes between the halves on GPUs and what their kernels report."""

from __future__ import annotations

from dataclasses import dataclass

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
from ep_server.exchange.api import ExchangeSpec


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
