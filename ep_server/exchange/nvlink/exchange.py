"""The exchange over NVLink: the Protocol of exchange.py on CUDA tensors, one GPU per rank, one host.

Checks tensors, allocates outputs and enqueues kernels on the current stream; nothing here waits for the GPU
but COMPACT and INDEX outside a graph, whose exact size the host must learn. Failures that a kernel finds are
raised by the next call, check() or synchronize(). A rank tells the others which of its banks are free when
its next kernel starts, in barrier() or in synchronize(). Everything can be captured in a CUDA graph and
replayed; sends of one exchange follow one another in stream order. Durations in ns.

Beyond the Protocol:
    NvlinkExchange(spec, control=..., on_timeout="raise" | "mask", num_sms=0, validate=False)
    .dispatch(...) , .combine(...)           both halves in one kernel, where nothing is done between them
    .dispatch_send(..., tokens_on_device=)   T of each replay, int32 [1]
    PendingDispatch.recv(counts=, capacity=, source_map=True, expert_stats=, wait_stats=)
    .combine(..., add_norm=), .can_norm(...) what ends a layer, in the same kernel
    .combine_send(..., wire="bf16" | "fp8" | "log10"), PendingCombine.recv(wait_stats=)
    .bounded(num_sms), .empty_padded(), .release(received), .check(), .synchronize()
    .masked, .mask(ranks), .reset(dead=()), .statistics(), .set_faults(faults), .memory_bytes
What is not an operation: group.py. Made by bootstrap.from_process_group (a process per GPU) or
from_local (several GPUs in one process).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ep_server import _cuda
from ep_server.errors import ConfigError
from ep_server.exchange.api import AddNorm, ExchangeSpec, FusedExchange, Received, Reduction, View
from ep_server.exchange.nvlink.group import NvlinkGroup
from ep_server.exchange.nvlink.launch import BOTH, SEND
from ep_server.exchange.nvlink.pending import COMBINE, DISPATCH, PendingCombine, PendingDispatch
from ep_server.exchange.nvlink.requests import CombineTensors, Handle, Receipt, Wire
from ep_server.exchange.nvlink.shapes import (
    can_norm,
    check_answer,
    check_dispatch,
    check_norm,
    choose,
    combine_mode,
    handle_of,
)
from ep_server.exchange.shm import ShmExchange
from ep_server.exchange.validate import check_tokens
from ep_server.exchange.views import Tensors


class NvlinkExchange(NvlinkGroup):
    """One rank's end of a group of GPUs. Satisfies exchange.Exchange on tensors of `device`.

    Calls are made with `device` current. Where two streams may wait for peers at once, num_sms must leave
    room for the sends behind them: at most half of the GPU each.

    Args:
        spec: this rank's; the other ranks' differ in `rank` only.
        control: an exchange of control_spec(spec) over the same ranks; owned by this one from now on.
          all_gather, barrier and reset meet there: every rank calls them, each from a thread of its own.
        device: GPU ordinal; None = the current one.
        on_timeout: "raise" aborts the group; "mask" goes on without the peer.
        num_sms: multiprocessors that a kernel may fill; 0 = all; 1 is enough for any operation.
        validate: reads ids back and checks them before anything is sent; for tests, it waits for the GPU.
    Raises: ConfigError; StartupError where a GPU, its driver or peer access is missing.
    """

    def __init__(
        self,
        spec: ExchangeSpec,
        *,
        control: ShmExchange,
        device: int | None = None,
        on_timeout: str = "raise",
        num_sms: int = 0,
        validate: bool = False,
    ) -> None:
        super().__init__(spec, control=control, device=device, on_timeout=on_timeout, num_sms=num_sms)
        self._validate = validate

    # -- the Protocol ---------------------------------------------------------------------------------

    @property
    def fused(self) -> FusedExchange:
        """As the Protocol says."""
        return self

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *,
        tokens_on_device: torch.Tensor | None = None,
    ) -> PendingDispatch:
        """As the Protocol says. Tensors must not change before the stream has passed this point.

        Args:
            tokens_on_device: [1] int32, how many of the T tokens count; read when the kernel runs.
        """
        handle = self._new_handle(x, topk_ids, topk_weights)
        send = self._open().send_args(x, topk_ids, topk_weights, tokens_on_device)
        self._open().dispatch(SEND, send, _cuda.DispatchRecvArgs(), handle, (x,))
        self._flights.take(DISPATCH, handle)
        return PendingDispatch(self._open, handle)

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
        wire: Wire = Wire.BF16,
    ) -> PendingCombine:
        """As the Protocol says. expert_out is read in place when the kernel runs.

        Args:
            topk_weights: [T, K] float32 where dispatch had none. With reduction rank they are pushed to the
              experts' ranks first.
            wire: how rows travel; other than bf16 with reduction rank and H a multiple of 128.
        """
        launcher, mode = self._open(), combine_mode(self.spec, reduction, wire)
        handle = check_answer(self._shapes, expert_out, received, topk_weights, mode)
        self._check_bank(COMBINE)
        launcher.combine(SEND, handle, mode, CombineTensors(expert_out, topk_weights))
        handle.held, handle.answering = False, True
        pending = PendingCombine(self._open, handle, topk_weights, mode)
        self._flights.take(COMBINE, pending)
        return pending

    # -- both halves at once --------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        view: View = View.PADDED,
        *,
        out: Tensors | None = None,
        counts: torch.Tensor | None = None,
        capacity: int | None = None,
        source_map: bool = False,
        tokens_on_device: torch.Tensor | None = None,
        expert_stats: torch.Tensor | None = None,
        wait_stats: torch.Tensor | None = None,
        most_tokens: int | None = None,
        next_reads_ahead: bool = False,
    ) -> Received:
        """dispatch_send and recv in one kernel: rows are placed while others are under way.

        Keywords: see dispatch_send and requests.Receipt.
        """
        handle = self._new_handle(x, topk_ids, topk_weights)
        send = self._open().send_args(x, topk_ids, topk_weights, tokens_on_device)
        view = choose("view", View, view)
        stats = (expert_stats, wait_stats)
        receipt = Receipt(view, out, counts, capacity, source_map, *stats, most_tokens, next_reads_ahead)
        received = self._open().receive(handle, (send, x), receipt)
        self._flights.take(DISPATCH, handle)
        return received

    def combine(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        reduction: Reduction | None = None,
        wire: Wire = Wire.BF16,
        wait_stats: torch.Tensor | None = None,
        next_reads_ahead: bool = False,
        add_norm: AddNorm | None = None,
    ) -> torch.Tensor:
        """combine_send and recv in one kernel; keywords as there and in requests.CombineTensors."""
        launcher, mode = self._open(), combine_mode(self.spec, reduction, wire)
        handle = check_answer(self._shapes, expert_out, received, topk_weights, mode)
        self._check_bank(COMBINE)
        out = self._shapes.result(handle, out)
        if add_norm is not None:
            check_norm(self._shapes, handle.tokens, add_norm, mode)
        tensors = CombineTensors(expert_out, topk_weights, out, wait_stats, next_reads_ahead, add_norm)
        launcher.combine(BOTH, handle, mode, tensors)
        handle.held = False
        self._flights.take(COMBINE, None)
        return out

    def can_norm(self, norm: AddNorm) -> bool:
        """Whether combine takes it, as far as its tensors go; else its sums are left to another kernel."""
        return can_norm(self._shapes, norm)

    @contextmanager
    def bounded(self, num_sms: int) -> Iterator[None]:
        """What is enqueued inside fills at most so many multiprocessors, if it may fill more outside.

        Captured kernels keep to it. Raises: ConfigError for less than one.
        """
        if num_sms < 1:
            raise ConfigError("num_sms", num_sms, "1 or more")
        launcher = self._open()
        before, launcher.num_sms = launcher.num_sms, min(num_sms, launcher.num_sms)
        try:
            yield
        finally:
            launcher.num_sms = before

    # -- views ----------------------------------------------------------------------------------------

    def empty_padded(self) -> Tensors:
        """Rows and scales of a PADDED view; each scale column starts at a multiple of 16 bytes."""
        return self._shapes.empty_padded()

    def release(self, received: Received) -> None:
        """Gives the bank of an INDEX view back to the senders; without effect on other views."""
        handle = handle_of(received)
        if handle.held:
            self._open().release(handle)
            handle.held = False

    def __repr__(self) -> str:
        spec = self.spec
        what = f"{self.device}, {spec.payload}, {spec.reduction}"
        return f"NvlinkExchange(rank={spec.rank}/{spec.num_ranks}, {what})"

    # -- inside ---------------------------------------------------------------------------------------

    def _check_bank(self, op: str) -> None:
        self.check()
        self._flights.check(op)

    def _new_handle(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None) -> Handle:
        group, tokens = self._open().group, check_dispatch(self._shapes, x, ids, weights)
        if self._validate:
            check_tokens(self.spec, x.cpu(), ids.cpu(), None if weights is None else weights.cpu())
        self._check_bank(DISPATCH)
        memory = torch.empty(group.handle_bytes, dtype=torch.uint8, device=self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        handle = Handle(memory, tokens, weights is not None, self.spec.max_tokens, stream=stream)
        handle.generation = self._open().generation
        return handle
