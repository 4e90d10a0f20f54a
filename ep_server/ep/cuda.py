"""The exchange over NVLink: the Protocol of exchange.py on CUDA tensors, one GPU per rank, one host.

Checks tensors, allocates outputs and enqueues kernels on the current stream; nothing here waits for the GPU
but COMPACT and INDEX outside a graph, whose exact size the host must learn. Failures that a kernel finds are
raised by the next call, check() or synchronize(). Everything can be captured in a CUDA graph and replayed;
sends of one exchange follow one another in stream order. Durations in ns.

Beyond the Protocol:
    CudaExchange(spec, control=..., on_timeout="raise" | "mask", num_sms=0, validate=False)
    .dispatch(...) , .combine(...)           both halves in one kernel, where nothing is done between them
    .dispatch_send(..., tokens_on_device=)   T of each replay, int32 [1]
    PendingDispatch.recv(capacity=, source_map=True)
    .empty_padded(), .release(received), .check(), .synchronize(), .masked, .mask(ranks), .reset(dead=())
    .statistics(), .memory_bytes
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ep_server import _cuda
from ep_server.ep.checks import check_tokens
from ep_server.ep.cuda_handle import Handle
from ep_server.ep.cuda_launch import BOTH, RECV, SEND, Launcher
from ep_server.ep.cuda_memory import share_regions
from ep_server.ep.cuda_shapes import Shapes, Tensors
from ep_server.ep.exchange import ExchangeSpec, Payload, Received, Reduction, View
from ep_server.ep.geometry import PAYLOADS, REDUCTIONS
from ep_server.ep.limits import check_spec
from ep_server.ep.native import NativeExchange
from ep_server.errors import (
    ConfigError,
    HookNotCalled,
    InvalidArgument,
    StartupError,
)

DISPATCH, COMBINE = "dispatch", "combine"


class PendingDispatch:
    """A dispatch whose send half has run. See exchange.PendingDispatch."""

    def __init__(self, exchange: CudaExchange, handle: Handle) -> None:
        self._exchange, self.handle = exchange, handle

    def recv(
        self,
        view: View = View.COMPACT,
        *,
        out: Tensors | None = None,
        capacity: int | None = None,
        source_map: bool = False,
    ) -> Received:
        """As the Protocol says, on the current stream.

        Args:
            out: rows and scales of an earlier empty_padded(), PADDED only.
            capacity: rows of a COMPACT or INDEX view. None = as many as can come; outside a graph the view
              is then cut to what came. More rows than that fail as InvalidArgument.
            source_map: fills the handle's src_info and layout_range; PADDED only.
        """
        if self.handle.received:
            raise InvalidArgument("dispatch", "received", "received once")
        return self._exchange._open().receive(self.handle, None, View(view), out, capacity, source_map)


class PendingCombine:
    """A combine whose send half has run. See exchange.PendingCombine."""

    def __init__(
        self, exchange: CudaExchange, handle: Handle, weights: torch.Tensor | None, reduction: Reduction
    ) -> None:
        self._exchange, self._handle, self._weights, self._reduction = exchange, handle, weights, reduction
        self.received = False

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """As the Protocol says, on the current stream."""
        if self.received:
            raise InvalidArgument("combine", "received", "received once")
        self.received = True
        out = self._exchange._shapes.result(self._handle, out)
        self._exchange._open().combine(RECV, self._handle, None, out, self._weights, self._reduction)
        return out


class CudaExchange:
    """One rank's end of a group of GPUs. Satisfies exchange.Exchange on tensors of `device`.

    Args:
        spec: this rank's; the other ranks' differ in `rank` only.
        control: an exchange of control_spec(spec) over the same ranks; owned by this one from now on.
        device: GPU ordinal; None = the current one.
        on_timeout: "raise" aborts the group; "mask" goes on without the peer.
        num_sms: multiprocessors that a kernel may fill; 0 = all.
        validate: reads ids back and checks them before anything is sent; for tests, it waits for the GPU.
    Raises: ConfigError; StartupError where a GPU, its driver or peer access is missing.
    """

    def __init__(
        self,
        spec: ExchangeSpec,
        *,
        control: NativeExchange,
        device: int | None = None,
        on_timeout: str = "raise",
        num_sms: int = 0,
        validate: bool = False,
    ) -> None:
        check_spec(spec)
        if spec.num_ranks > _cuda.MAX_RANKS:
            raise ConfigError("num_ranks", spec.num_ranks, f"at most {_cuda.MAX_RANKS} on one host")
        if spec.payload == Payload.FP32:
            raise ConfigError("payload", spec.payload, "bf16 or one of fp8 on a GPU")
        if on_timeout not in {"raise", "mask"}:
            raise ConfigError("on_timeout", on_timeout, "one of raise, mask")
        if not torch.cuda.is_available():
            raise StartupError("the exchange over NVLink needs a CUDA device, none is available")
        self.spec = spec
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        self._validate = validate
        self._shapes = Shapes(spec, self.device)
        self._control: NativeExchange | None = control
        try:
            with torch.cuda.device(self.device):
                group = _cuda.Group(
                    num_ranks=spec.num_ranks,
                    max_tokens=spec.max_tokens,
                    hidden=spec.hidden,
                    top_k=spec.top_k,
                    num_banks=spec.num_banks,
                    payload=PAYLOADS.index(Payload(spec.payload)),
                    reduction=REDUCTIONS.index(Reduction(spec.reduction)),
                    rank=spec.rank,
                    placement=list(spec.placement),
                    device=self.device.index,
                    timeout_ns=spec.timeout_ns,
                    mask_on_timeout=on_timeout == "mask",
                )
                share_regions(control, spec, group)
        except RuntimeError as error:
            raise StartupError(f"rank {spec.rank}: {error}") from error
        if not 0 <= num_sms <= group.num_sms:
            raise ConfigError("num_sms", num_sms, f"0 to {group.num_sms}")
        launcher = Launcher(group, spec, self._shapes, num_sms or group.num_sms)
        self._launcher: Launcher | None = launcher
        self._flights: dict[str, list[Any]] = {op: [None] * spec.num_banks for op in (DISPATCH, COMBINE)}
        self._sends = {DISPATCH: 0, COMBINE: 0}

    # -- the Protocol ---------------------------------------------------------------------------------

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
        pending = PendingDispatch(self, handle)
        self._take_bank(DISPATCH, handle)
        return pending

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
    ) -> PendingCombine:
        """As the Protocol says. expert_out is read in place when the kernel runs."""
        handle, chosen = self._check_answer(expert_out, received, topk_weights, reduction)
        self._check_bank(COMBINE)
        self._open().combine(SEND, handle, expert_out, None, None, chosen)
        handle.held = False
        pending = PendingCombine(self, handle, topk_weights, chosen)
        self._take_bank(COMBINE, pending)
        return pending

    def all_gather(self, record: bytes) -> list[bytes]:
        """As the Protocol says; over host memory."""
        return self._open_control().all_gather(record)

    def barrier(self) -> None:
        """As the Protocol says: of the processes, not of their streams."""
        self._open_control().barrier()

    def close(self) -> None:
        """As the Protocol says. Waits for the GPU."""
        if self._control is None:
            return
        torch.cuda.synchronize(self.device)
        self._launcher = None
        self._control.close()
        self._control = None

    # -- both halves at once --------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        view: View = View.PADDED,
        *,
        out: Tensors | None = None,
        capacity: int | None = None,
        source_map: bool = False,
        tokens_on_device: torch.Tensor | None = None,
    ) -> Received:
        """dispatch_send and recv in one kernel: rows are placed while others are under way."""
        handle = self._new_handle(x, topk_ids, topk_weights)
        send = self._open().send_args(x, topk_ids, topk_weights, tokens_on_device)
        received = self._open().receive(handle, (send, x), View(view), out, capacity, source_map)
        self._take_bank(DISPATCH, handle)
        return received

    def combine(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        reduction: Reduction | None = None,
    ) -> torch.Tensor:
        """combine_send and recv in one kernel."""
        handle, chosen = self._check_answer(expert_out, received, topk_weights, reduction)
        self._check_bank(COMBINE)
        out = self._shapes.result(handle, out)
        self._open().combine(BOTH, handle, expert_out, out, topk_weights, chosen)
        handle.held = False
        self._take_bank(COMBINE, None)
        return out

    # -- views ----------------------------------------------------------------------------------------

    def empty_padded(self) -> Tensors:
        """Rows and scales of a PADDED view; each scale column starts at a multiple of 16 bytes."""
        return self._shapes.empty_padded()

    def release(self, received: Received) -> None:
        """Gives the bank of an INDEX view back to the senders; without effect on other views."""
        handle = self._handle_of(received)
        if handle.held:
            self._open().release(handle)
            handle.held = False

    # -- failure, membership, measurements ------------------------------------------------------------

    def check(self) -> None:
        """Raises what a kernel has found since; never waits.

        Raises: PeerTimeout, HookNotCalled, GroupAborted, ProtocolViolation, InvalidArgument.
        """
        self._open().check()

    def synchronize(self) -> None:
        """Waits for the current stream, then check()."""
        torch.cuda.current_stream(self.device).synchronize()
        self.check()

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that this one neither writes to nor waits for."""
        bits = self._open().group.epochs()[2]
        return frozenset(r for r in range(self.spec.num_ranks) if bits >> r & 1)

    def mask(self, ranks: Iterable[int]) -> None:
        """Stops talking to these ranks, also in a kernel that waits for them. Local to this rank."""
        self._open().group.mask(sum(1 << rank for rank in set(ranks) - {self.spec.rank}))

    def reset(self, dead: Iterable[int] = ()) -> None:
        """Starts a new generation: no abort, no operation in flight, no mask but `dead`. Collective."""
        control, gone = self._open_control(), frozenset(dead)
        torch.cuda.synchronize(self.device)
        control.reset(gone)
        dispatches, combines, _ = self._open().group.epochs()
        theirs = control.all_gather(max(dispatches, combines).to_bytes(8, "little"))
        last = max(int.from_bytes(record, "little") for record in theirs)
        banks = self.spec.num_banks
        base = (last + 3 * banks) // banks * banks  # beyond every epoch of the old generation
        self._open().group.reset(base, sum(1 << rank for rank in gone))
        self._flights = {op: [None] * banks for op in (DISPATCH, COMBINE)}
        control.barrier()

    def statistics(self) -> dict[str, Any]:
        """Cumulative measurements, kept on the GPU; copied beside the streams that work.

        Returns: histograms, sums, counters, peer_wait_ns, peer_wait_max_ns, expert_tokens.
        """
        found: dict[str, Any] = self._open().group.statistics()
        local = found.pop("local_expert_tokens")
        found["expert_tokens"] = {e: local[i] for i, e in enumerate(self.spec.local_experts)}
        return found

    @property
    def memory_bytes(self) -> int:
        """Device memory of this rank's end, without tensors that callers hold."""
        return int(self._open().group.bytes)

    def __repr__(self) -> str:
        spec = self.spec
        what = f"{self.device}, {spec.payload}, {spec.reduction}"
        return f"CudaExchange(rank={spec.rank}/{spec.num_ranks}, {what})"

    # -- inside ---------------------------------------------------------------------------------------

    def _open(self) -> Launcher:
        if self._launcher is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._launcher

    def _open_control(self) -> NativeExchange:
        if self._control is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._control

    def _take_bank(self, op: str, flight: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # a graph has no host beside it: the kernels look after its banks
        self._flights[op][self._sends[op] % self.spec.num_banks] = flight
        self._sends[op] += 1

    def _check_bank(self, op: str) -> None:
        self.check()
        before = self._flights[op][self._sends[op] % self.spec.num_banks]
        if before is None or torch.cuda.is_current_stream_capturing():
            return
        if not before.received or getattr(before, "held", False):
            raise HookNotCalled(
                f"rank {self.spec.rank}: {op} takes a bank that was not received or released here"
            )

    def _new_handle(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None) -> Handle:
        spec, group = self.spec, self._open().group
        tokens = x.shape[0] if x.dim() == 2 else -1
        self._shapes.check("x", x, torch.bfloat16, tokens, spec.hidden)
        if tokens > spec.max_tokens:
            raise InvalidArgument("x", f"T = {tokens}", f"at most max_tokens = {spec.max_tokens} tokens")
        self._shapes.check("topk_ids", ids, torch.int64, tokens, spec.top_k)
        if weights is not None:
            self._shapes.check("topk_weights", weights, torch.float32, tokens, spec.top_k)
        elif spec.reduction == Reduction.RANK:
            raise InvalidArgument("topk_weights", None, "given at dispatch for reduction rank")
        if self._validate:
            check_tokens(spec, x.cpu(), ids.cpu(), None if weights is None else weights.cpu())
        self._check_bank(DISPATCH)
        memory = torch.empty(group.handle_bytes, dtype=torch.uint8, device=self.device)
        return Handle(memory, tokens, weights is not None)

    def _handle_of(self, received: Received) -> Handle:
        if not isinstance(received.handle, Handle):
            raise InvalidArgument("received.handle", received.handle, "of a dispatch of this exchange")
        return received.handle

    def _check_answer(
        self,
        expert_out: torch.Tensor,
        received: Received,
        weights: torch.Tensor | None,
        reduction: Reduction | None,
    ) -> tuple[Handle, Reduction]:
        spec, handle = self.spec, self._handle_of(received)
        chosen = spec.reduction if reduction is None else Reduction(reduction)
        if chosen == Reduction.SOURCE and spec.reduction == Reduction.RANK:
            raise InvalidArgument("reduction", str(chosen), "rank, as the spec says")
        rows = (self._shapes.local, self._shapes.padded) if received.view == View.PADDED else (handle.rows,)
        self._shapes.check("expert_out", expert_out, torch.bfloat16, *rows, spec.hidden)
        if weights is not None:
            if handle.weighted or chosen == Reduction.RANK:
                raise InvalidArgument("topk_weights", "a tensor", "None: this dispatch was given them")
            self._shapes.check("topk_weights", weights, torch.float32, handle.tokens, spec.top_k)
        elif not handle.weighted and (chosen == Reduction.RANK or handle.tokens):
            raise InvalidArgument("topk_weights", None, "given at dispatch or at combine")
        return handle, chosen
