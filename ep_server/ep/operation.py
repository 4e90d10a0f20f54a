"""One dispatch of a Buffer, from its send half to its last combine.

Outputs are handed out before they are filled; an Operation is what the five values of a handle do not say.
An Operation must not hold any of its outputs: it lives as long as the handle's src_info does.
"""

from __future__ import annotations

import torch

from ep_server.ep.arenas import Arena
from ep_server.ep.exchange import Payload, Received, View
from ep_server.ep.native import PendingDispatch
from ep_server.errors import InvalidArgument


class Outputs:
    """The tensors that low_latency_dispatch returns: rows, scales, counts, src_info, layout_range."""

    def __init__(self, arena: Arena) -> None:
        spec = arena.exchange.spec
        local, capacity = len(spec.local_experts), spec.num_ranks * spec.max_tokens
        self.rows, self.scales = arena.exchange.empty_padded()
        self.counts = torch.empty(local, dtype=torch.int32)
        self.src_info = torch.empty((local, capacity), dtype=torch.int32)
        self.layout_range = torch.empty((local, spec.num_ranks), dtype=torch.int64)


class Operation:
    """A dispatch whose send half has run.

    Attributes:
        ids: [T, K] as dispatched. weighted: weights went with it.
        turn: which of the arena's combine buffers belongs to it.
        received: None until the hook has run; without rows.
    """

    def __init__(self, arena: Arena, ids: torch.Tensor, weighted: bool) -> None:
        self.arena, self.ids, self.weighted = arena, ids.clone(), weighted
        self.turn = arena.next_turn()
        self.received: Received | None = None

    def receive(self, pending: PendingDispatch, outputs: Outputs) -> torch.Tensor:
        """Runs the second half into `outputs`; returns how long it waited for each rank, [R] int64 ns."""
        received = pending.recv(View.PADDED, out=(outputs.rows, outputs.scales))
        outputs.counts.copy_(received.counts)
        src_info, layout_range = self.arena.exchange.source_map(received)
        outputs.src_info.copy_(src_info)
        outputs.layout_range.copy_(layout_range)
        received.rows, received.scales = torch.empty(0), None
        self.received = received
        return pending.wait_ns


def payload_of(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Payload:
    """The payload that the three flags of low_latency_dispatch name."""
    if use_ue8m0 and not round_scale:
        raise InvalidArgument("use_ue8m0", True, "given together with round_scale=True")
    if not use_fp8:
        return Payload.BF16
    if use_ue8m0:
        return Payload.FP8_UE8M0
    return Payload.FP8_POW2 if round_scale else Payload.FP8
