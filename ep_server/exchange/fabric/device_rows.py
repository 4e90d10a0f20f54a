"""Memory of one device that the network writes rows to and sends rows from, and the tensors over it.

Dispatched rows are stored where the rank's own rows arrive: one copy serves the rank itself and all others.
Rows move on the caller's stream only. csrc/exchange/common/layout.hpp defines the offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ep_server import _C
from ep_server.exchange.api import ExchangeSpec, Payload
from ep_server.exchange.quant import quantise
from ep_server.exchange.spec import FP8, geometry_of

ALIGNMENT = 1 << 16  # bytes: a GPU's page, so that no other tensor lies in what cards write


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Memory that one rank registers.

    inbound: uint8, dispatched and returned rows of all banks as they arrive. outbound: uint8, rows that are
      returned. kind: libfabric's fi_hmem_iface. number: of the device among those of its kind.
    """

    HOST: ClassVar[int] = 0
    CUDA: ClassVar[int] = 1

    spec: ExchangeSpec
    layout: _C.Layout
    inbound: torch.Tensor
    outbound: torch.Tensor
    kind: int
    number: int

    @classmethod
    def allocate(cls, spec: ExchangeSpec, device: torch.device) -> DeviceRows:
        """On a GPU, or on the CPU in its place. Raises: ConfigError; torch.OutOfMemoryError."""
        layout = _C.Layout(geometry_of(spec))
        inbound, outbound = _aligned(layout.device_in, device), _aligned(layout.device_out, device)
        kind = cls.CUDA if device.type == "cuda" else cls.HOST
        return cls(spec, layout, inbound, outbound, kind, device.index or 0)

    @property
    def dispatched(self) -> torch.Tensor:
        """uint8, dispatched rows of all banks: the region of HostExchange."""
        return self.inbound[: self.layout.combine - self.layout.rows]

    @property
    def bytes(self) -> int:
        """Of both."""
        return len(self.inbound) + len(self.outbound)

    def native(self) -> tuple[int, int, int, int, int, int]:
        """The same for csrc."""
        inbound, outbound = self.inbound, self.outbound
        sizes = (inbound.data_ptr(), len(inbound), outbound.data_ptr(), len(outbound))
        return (*sizes, self.kind, self.number)

    def put(self, bank: int, x: torch.Tensor) -> None:
        """Writes this rank's rows, quantised if the payload is FP8, to where they are sent from.

        Args:
            x: [T, H] of the device.
        """
        layout, tokens = self.layout, len(x)
        begin = layout.row_at(bank, self.spec.rank, 0) - layout.rows
        block = self.inbound[begin : begin + tokens * layout.row_pitch].view(tokens, layout.row_pitch)
        rows = block[:, : layout.row_bytes]
        if self.spec.payload not in FP8:
            rows.view(x.dtype).copy_(x)
            return
        codes, scales = quantise(x, Payload(self.spec.payload))
        rows.copy_(codes.view(torch.uint8))
        end = layout.scale_offset + layout.scale_bytes
        block[:, layout.scale_offset : end].copy_(scales.view(torch.uint8))

    def arrived(self, bank: int) -> torch.Tensor:
        """[slots, H] returned rows as they arrive, by csrc/exchange/common/row_tables.hpp's numbers."""
        return self._returned(self.inbound, bank, self.layout.rows)

    def leaving(self, bank: int) -> torch.Tensor:
        """[slots, H] rows that are returned to each rank, by the same numbers."""
        return self._returned(self.outbound, bank, self.layout.combine)

    @property
    def slots_per_rank(self) -> int:
        """Neighbouring slots that belong to one rank."""
        return self.spec.max_tokens * self.layout.choices_per_token

    def _returned(self, memory: torch.Tensor, bank: int, origin: int) -> torch.Tensor:
        layout, slots = self.layout, self.spec.num_ranks * self.slots_per_rank
        begin = layout.choice_at(bank, 0, 0, 0) - origin
        block = memory[begin : begin + slots * layout.combine_pitch].view(slots, layout.combine_pitch)
        dtype = torch.float32 if self.spec.payload == Payload.FP32 else torch.bfloat16
        return block[:, : layout.combine_bytes].view(dtype)


def _aligned(size: int, device: torch.device) -> torch.Tensor:
    pages = -(-size // ALIGNMENT)
    made = torch.empty((pages + 1) * ALIGNMENT, dtype=torch.uint8, device=device)
    begin = -made.data_ptr() % ALIGNMENT
    return made[begin : begin + size]
