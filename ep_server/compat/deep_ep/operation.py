"""One dispatch of a Buffer, from its send half to its last combine, and what an arena does with it.

Outputs are handed out before they are filled; an Operation is what the five values of a handle do not say.
An Operation must not hold any of its outputs: it lives as long as the handle's src_info does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ep_server.compat.deep_ep.events import EventOverlap
from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Payload, Received

NUM_COMBINE_BUFFERS = 2  # two micro-batches, as in DeepEP
Hook = Callable[[], None]
Ended = tuple[EventOverlap, Hook | None]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call ends: with an event instead of a wait, or with a hook that runs its second half."""

    asynchronous: bool
    hook: bool


@dataclass(frozen=True, slots=True)
class DispatchCall:
    """What low_latency_dispatch was given. Statistics are added to; None = not wanted.

    x [T, H], ids [T, K], weights [T, K] or None, expert_stats [E_local] int32, wait_stats [R] int64 ns.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    expert_stats: torch.Tensor | None
    wait_stats: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class CombineCall:
    """What low_latency_combine was given.

    expert_out [E_local, R * max_tokens, H], ids [T, K], weights [T, K] or None where dispatch had them,
    out [T, H], written; wait_stats [R] int64 ns, added to; log_format: rows return in 10 bits a channel.
    """

    expert_out: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    out: torch.Tensor
    wait_stats: torch.Tensor | None
    log_format: bool


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tensors that low_latency_dispatch returns."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor


@dataclass(slots=True)
class Operation:
    """A dispatch whose send half has run.

    Attributes:
        tokens, top_k: T and K as dispatched. weighted: weights went with it.
        turn: which of the arena's combine buffers belongs to it. generation: of the arena, at its dispatch.
        ids: a copy of the ids, where combine compares them.
        received: None until the second half has run; without rows.
        answering: a combine of it waits for its hook.
    """

    arena: Arena
    tokens: int
    top_k: int
    weighted: bool
    turn: int
    generation: int = 0
    ids: torch.Tensor | None = None
    received: Received | None = None
    answering: bool = False


class Arena(Protocol):
    """One exchange as a Buffer uses it.

    Attributes:
        pinned: a CUDA graph uses it, so it must stay.
        known_masked: ranks known to be masked without asking the device.
    """

    spec: ExchangeSpec
    device: torch.device
    pinned: bool

    @property
    def known_masked(self) -> frozenset[int]: ...  # noqa: D102

    def masked(self) -> frozenset[int]:
        """Ranks that this one neither writes to nor waits for, after all calls so far."""
        ...

    def mask(self, ranks: Iterable[int]) -> None:
        """Stops talking to these ranks. Local."""
        ...

    def reset(self, dead: frozenset[int]) -> None:
        """Starts a new generation with only `dead` masked. Collective among the others."""
        ...

    def close(self) -> None:
        """Frees the memory; idempotent."""
        ...

    def dispatch(self, call: DispatchCall, ending: Ending) -> tuple[Operation, Outputs, Ended]:
        """Runs the first half, and the second too unless it ends with a hook."""
        ...

    def combine(self, operation: Operation, call: CombineCall, ending: Ending) -> Ended:
        """The same, of a combine into call.out."""
        ...

    def combine_buffer(self, operation: Operation) -> torch.Tensor:
        """[E_local, R * max_tokens, H] bfloat16, for the experts' outputs of this dispatch."""
        ...


class CombineBuffers:
    """Fixed memory for the experts' outputs of the last NUM_COMBINE_BUFFERS dispatches, taken on demand."""

    def __init__(self, spec: ExchangeSpec, device: torch.device) -> None:
        self._shape = (len(spec.local_experts), spec.num_ranks * spec.max_tokens, spec.hidden)
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * NUM_COMBINE_BUFFERS
        self._turns = 0

    def next_turn(self) -> int:
        """The number of the next dispatch."""
        self._turns += 1
        return self._turns

    def of(self, turn: int) -> torch.Tensor:
        """The buffer of a dispatch, or InvalidArgument where a later one has it now."""
        if self._turns - turn >= NUM_COMBINE_BUFFERS:
            given = f"of {self._turns - turn} dispatches ago"
            raise InvalidArgument("handle", given, f"one of the last {NUM_COMBINE_BUFFERS} of these sizes")
        at = turn % NUM_COMBINE_BUFFERS
        buffer = self._buffers[at]
        if buffer is None:
            buffer = torch.empty(self._shape, dtype=torch.bfloat16, device=self._device)
            self._buffers[at] = buffer
        return buffer


def empty_outputs(padded: tuple[torch.Tensor, torch.Tensor | None], spec: ExchangeSpec) -> Outputs:
    """Outputs around rows and scales of a PADDED view; nothing is written yet."""
    rows, scales = padded
    local, capacity = rows.shape[:2]
    return Outputs(
        rows=rows,
        scales=scales,
        counts=rows.new_empty(local, dtype=torch.int32),
        src_info=rows.new_empty((local, capacity), dtype=torch.int32),
        layout_range=rows.new_empty((local, spec.num_ranks), dtype=torch.int64),
    )


def without_rows(received: Received) -> Received:
    """What a combine needs of it: the caller may free the rows."""
    return replace(received, rows=received.rows.new_empty(0), scales=None)


def payload_of(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Payload:
    """The payload that the three flags of low_latency_dispatch name."""
    if use_ue8m0 and not round_scale:
        raise InvalidArgument("use_ue8m0", True, "given together with round_scale=True")
    if not use_fp8:
        return Payload.BF16
    if use_ue8m0:
        return Payload.FP8_UE8M0
    return Payload.FP8_POW2 if round_scale else Payload.FP8
