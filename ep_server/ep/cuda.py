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
from dataclasses import dataclass, replace
from typing import Any

import torch

from ep_server import _cuda
from ep_server.ep.checks import check_tokens
from ep_server.ep.cuda_memory import share_regions
from ep_server.ep.exchange import ExchangeSpec, Payload, Received, Reduction, View
from ep_server.ep.geometry import FP8, PAYLOADS, REDUCTIONS, check_spec
from ep_server.ep.native import VIEWS, NativeExchange
from ep_server.errors import (
    ConfigError,
    GroupAborted,
    HookNotCalled,
    InternalError,
    InvalidArgument,
    PeerTimeout,
    ProtocolViolation,
    StartupError,
)

SEND, RECV, BOTH = 1, 2, 3  # csrc/cuda/phases.hpp
VECTOR = 16  # bytes of one access
DISPATCH, COMBINE = "dispatch", "combine"
Tensors = tuple[torch.Tensor, torch.Tensor | None]  # rows, scales


def control_spec(spec: ExchangeSpec) -> ExchangeSpec:
    """The host-memory exchange beside the GPUs' one: votes, liveness and bootstrap, no rows."""
    return replace(
        spec,
        placement=tuple(range(spec.num_ranks)),
        max_tokens=1,
        hidden=1,
        top_k=1,
        payload=Payload.FP32,
        reduction=Reduction.RANK,
        num_banks=2,
    )


@dataclass(slots=True)
class Handle:
    """What a dispatch leaves for the halves after it.

    memory: device bytes that csrc calls DeviceHandle. rows: of the view, -1 where only the device knows.
    src_info, layout_range: DeepEP's handle, where asked for.
    """

    memory: torch.Tensor
    tokens: int
    weighted: bool
    rows: int = -1
    received: bool = False
    held: bool = False
    src_info: torch.Tensor | None = None
    layout_range: torch.Tensor | None = None


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
        return self._exchange._receive(self.handle, None, View(view), out, capacity, source_map)


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
        out = self._exchange._result(self._handle, out)
        self._exchange._combine(RECV, self._handle, None, out, self._weights, self._reduction)
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
        self._fp8 = spec.payload in FP8
        self._row_dtype = torch.float8_e4m3fn if self._fp8 else torch.bfloat16
        self._ue8m0 = spec.payload == Payload.FP8_UE8M0
        self._local = len(spec.local_experts)
        self._padded = spec.num_ranks * spec.max_tokens
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
        self._num_sms = num_sms or group.num_sms
        self._group: _cuda.Group | None = group
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
        send = self._send_args(x, topk_ids, topk_weights, tokens_on_device)
        self._launch_dispatch(SEND, send, _cuda.DispatchRecvArgs(), handle, (x,))
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
        self._combine(SEND, handle, expert_out, None, None, chosen)
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
        self._group = None
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
        send = self._send_args(x, topk_ids, topk_weights, tokens_on_device)
        return self._receive(handle, (send, x), View(view), out, capacity, source_map)

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
        out = self._result(handle, out)
        self._combine(BOTH, handle, expert_out, out, topk_weights, chosen)
        handle.held = False
        self._take_bank(COMBINE, None)
        return out

    # -- views ----------------------------------------------------------------------------------------

    def empty_padded(self) -> Tensors:
        """Rows and scales of a PADDED view; each scale column starts at a multiple of 16 bytes."""
        shape = (self._local, self._padded, self.spec.hidden)
        rows = torch.empty(shape, dtype=self._row_dtype, device=self.device)
        if not self._fp8:
            return rows, None
        plane = (self._local, self._groups, self._scale_pitch)
        scales = torch.empty(plane, dtype=self._scale_dtype, device=self.device)
        return rows, scales.transpose(1, 2)[:, : self._padded]

    def release(self, received: Received) -> None:
        """Gives the bank of an INDEX view back to the senders; without effect on other views."""
        handle = self._handle_of(received)
        if handle.held:
            self._open().release(self._stream(), handle.memory.data_ptr())
            handle.held = False

    # -- failure, membership, measurements ------------------------------------------------------------

    def check(self) -> None:
        """Raises what a kernel has found since; never waits.

        Raises: PeerTimeout, HookNotCalled, GroupAborted, ProtocolViolation, InvalidArgument.
        """
        status = self._open().status()
        if status is not None:
            raise_status(status, self.spec)

    def synchronize(self) -> None:
        """Waits for the current stream, then check()."""
        torch.cuda.current_stream(self.device).synchronize()
        self.check()

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that this one neither writes to nor waits for."""
        bits = self._open().epochs()[2]
        return frozenset(r for r in range(self.spec.num_ranks) if bits >> r & 1)

    def mask(self, ranks: Iterable[int]) -> None:
        """Stops talking to these ranks, also in a kernel that waits for them. Local to this rank."""
        self._open().mask(sum(1 << rank for rank in set(ranks) - {self.spec.rank}))

    def reset(self, dead: Iterable[int] = ()) -> None:
        """Starts a new generation: no abort, no operation in flight, no mask but `dead`. Collective."""
        control, gone = self._open_control(), frozenset(dead)
        torch.cuda.synchronize(self.device)
        control.reset(gone)
        dispatches, combines, _ = self._open().epochs()
        theirs = control.all_gather(max(dispatches, combines).to_bytes(8, "little"))
        last = max(int.from_bytes(record, "little") for record in theirs)
        banks = self.spec.num_banks
        base = (last + 3 * banks) // banks * banks  # beyond every epoch of the old generation
        self._open().reset(base, sum(1 << rank for rank in gone))
        self._flights = {op: [None] * banks for op in (DISPATCH, COMBINE)}
        control.barrier()

    def statistics(self) -> dict[str, Any]:
        """Cumulative measurements, kept on the GPU; copied beside the streams that work.

        Returns: histograms, sums, counters, peer_wait_ns, peer_wait_max_ns, expert_tokens.
        """
        found: dict[str, Any] = self._open().statistics()
        local = found.pop("local_expert_tokens")
        found["expert_tokens"] = {e: local[i] for i, e in enumerate(self.spec.local_experts)}
        return found

    @property
    def memory_bytes(self) -> int:
        """Device memory of this rank's end, without tensors that callers hold."""
        return int(self._open().bytes)

    def __repr__(self) -> str:
        spec = self.spec
        return f"CudaExchange(rank={spec.rank}/{spec.num_ranks}, {self.device}, {spec.payload}, {spec.reduction})"

    # -- inside ---------------------------------------------------------------------------------------

    def _open(self) -> _cuda.Group:
        if self._group is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._group

    def _open_control(self) -> NativeExchange:
        if self._control is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._control

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    @property
    def _groups(self) -> int:
        return self.spec.hidden // (512 if self._ue8m0 else 128)

    @property
    def _scale_dtype(self) -> torch.dtype:
        return torch.int32 if self._ue8m0 else torch.float32

    @property
    def _scale_pitch(self) -> int:
        return -(-self._padded // 4) * 4

    @property
    def _most_rows(self) -> int:
        return self._padded * min(self.spec.top_k, self._local)

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

    def _check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
        good = tensor.dtype == dtype and tuple(tensor.shape) == shape and tensor.is_contiguous()
        if not good or tensor.device != self.device:
            given = f"{tensor.dtype} {list(tensor.shape)} {tensor.stride()} on {tensor.device}"
            raise InvalidArgument(name, given, f"contiguous {dtype} {list(shape)} on {self.device}")
        return int(tensor.data_ptr())

    def _new_handle(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None) -> Handle:
        spec, group = self.spec, self._open()
        tokens = x.shape[0] if x.dim() == 2 else -1
        self._check("x", x, torch.bfloat16, tokens, spec.hidden)
        if tokens > spec.max_tokens:
            raise InvalidArgument("x", f"T = {tokens}", f"at most max_tokens = {spec.max_tokens} tokens")
        self._check("topk_ids", ids, torch.int64, tokens, spec.top_k)
        if weights is not None:
            self._check("topk_weights", weights, torch.float32, tokens, spec.top_k)
        elif spec.reduction == Reduction.RANK:
            raise InvalidArgument("topk_weights", None, "given at dispatch for reduction rank")
        if self._validate:
            check_tokens(spec, x.cpu(), ids.cpu(), None if weights is None else weights.cpu())
        self._check_bank(DISPATCH)
        memory = torch.empty(group.handle_bytes, dtype=torch.uint8, device=self.device)
        return Handle(memory, tokens, weights is not None)

    def _send_args(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, count: torch.Tensor | None
    ) -> _cuda.DispatchSendArgs:
        return _cuda.DispatchSendArgs(
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            weights=0 if weights is None else weights.data_ptr(),
            tokens_on_device=0 if count is None else self._check("tokens_on_device", count, torch.int32, 1),
            tokens=x.shape[0],
        )

    def _narrow(self, row_bytes: int, tensors: Iterable[torch.Tensor]) -> bool:
        return row_bytes % VECTOR != 0 or any(t.data_ptr() % VECTOR for t in tensors)

    def _launch_dispatch(
        self,
        halves: int,
        send: _cuda.DispatchSendArgs,
        recv: _cuda.DispatchRecvArgs,
        handle: Handle,
        tensors: tuple[torch.Tensor, ...],
    ) -> None:
        row_bytes = self.spec.hidden * self._row_dtype.itemsize
        narrow = self._narrow(row_bytes, tensors)
        if narrow and self._fp8:
            raise InvalidArgument("x", "not aligned", f"at a multiple of {VECTOR} bytes")
        self._open().dispatch(
            self._stream(), halves, self._num_sms, narrow, send, recv, handle.memory.data_ptr()
        )

    def _receive(
        self,
        handle: Handle,
        send: tuple[_cuda.DispatchSendArgs, torch.Tensor] | None,
        view: View,
        out: Tensors | None,
        capacity: int | None,
        source_map: bool,
    ) -> Received:
        spec, device = self.spec, self.device
        counts = torch.empty(self._local, dtype=torch.int32, device=device)
        offsets = torch.empty(self._local + 1, dtype=torch.int64, device=device)
        rows, row_ids, scales = torch.empty(0, device=device), None, None
        limit = self._most_rows if capacity is None else capacity
        if view == View.PADDED:
            rows, scales = self.empty_padded() if out is None else self._check_out(out)
            if source_map:
                handle.src_info = torch.empty((self._local, self._padded), dtype=torch.int32, device=device)
                shape = (self._local, spec.num_ranks)
                handle.layout_range = torch.empty(shape, dtype=torch.int64, device=device)
        elif out is not None or source_map:
            raise InvalidArgument("out, source_map", str(view), "given with view padded only")
        elif view == View.COMPACT:
            rows = torch.empty((limit, spec.hidden), dtype=self._row_dtype, device=device)
            if self._fp8:
                scales = torch.empty((limit, self._groups), dtype=self._scale_dtype, device=device)
        else:
            row_ids = torch.empty(limit, dtype=torch.int64, device=device)
        recv = _cuda.DispatchRecvArgs(
            view=VIEWS.index(view),
            capacity=limit,
            scale_pitch=self._scale_pitch if scales is None or view != View.PADDED else scales.stride(2),
            rows=rows.data_ptr(),
            scales=0 if scales is None else scales.data_ptr(),
            row_ids=0 if row_ids is None else row_ids.data_ptr(),
            counts=counts.data_ptr(),
            offsets=offsets.data_ptr(),
            src_info=0 if handle.src_info is None else handle.src_info.data_ptr(),
            layout_range=0 if handle.layout_range is None else handle.layout_range.data_ptr(),
        )
        args, tensors = (_cuda.DispatchSendArgs(), (rows,)) if send is None else (send[0], (send[1], rows))
        self._launch_dispatch(RECV if send is None else BOTH, args, recv, handle, tensors)
        handle.received, handle.held = True, view == View.INDEX
        if send is not None:
            self._take_bank(DISPATCH, handle)
        if view == View.INDEX:
            rows, scales = self._regions()
        if view != View.PADDED:
            handle.rows = limit
            if capacity is None and not torch.cuda.is_current_stream_capturing():
                handle.rows = int(offsets[-1])  # waits for the GPU
                self.check()
                if view == View.COMPACT:
                    rows, scales = rows[: handle.rows], None if scales is None else scales[: handle.rows]
                row_ids = None if row_ids is None else row_ids[: handle.rows]
        return Received(rows, counts, offsets, handle, view, scales, row_ids)

    def _check_out(self, out: Tensors) -> Tensors:
        rows, scales = out
        self._check("out rows", rows, self._row_dtype, self._local, self._padded, self.spec.hidden)
        if (scales is not None) != self._fp8:
            raise InvalidArgument("out scales", scales is not None, f"as payload {self.spec.payload} has it")
        if scales is not None:
            shape, plane = (self._local, self._padded, self._groups), self._groups * scales.stride(2)
            good = scales.dtype == self._scale_dtype and tuple(scales.shape) == shape
            if not good or scales.device != self.device or scales.stride()[:2] != (plane, 1):
                raise InvalidArgument("out scales", tuple(scales.shape), "as empty_padded() makes them")
        return out

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
        rows = (self._local, self._padded) if received.view == View.PADDED else (handle.rows,)
        self._check("expert_out", expert_out, torch.bfloat16, *rows, spec.hidden)
        if weights is not None:
            if handle.weighted or chosen == Reduction.RANK:
                raise InvalidArgument("topk_weights", "a tensor", "None: this dispatch was given them")
            self._check("topk_weights", weights, torch.float32, handle.tokens, spec.top_k)
        elif not handle.weighted and (chosen == Reduction.RANK or handle.tokens):
            raise InvalidArgument("topk_weights", None, "given at dispatch or at combine")
        return handle, chosen

    def _result(self, handle: Handle, out: torch.Tensor | None) -> torch.Tensor:
        shape = (handle.tokens, self.spec.hidden)
        if out is None:
            return torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        self._check("out", out, torch.bfloat16, *shape)
        return out

    def _combine(
        self,
        halves: int,
        handle: Handle,
        expert_out: torch.Tensor | None,
        out: torch.Tensor | None,
        weights: torch.Tensor | None,
        reduction: Reduction,
    ) -> None:
        which = REDUCTIONS.index(reduction)
        given = [t for t in (expert_out, out) if t is not None]
        recv = _cuda.CombineRecvArgs(
            out=0 if out is None else out.data_ptr(),
            weights=0 if weights is None else weights.data_ptr(),
            reduction=which,
        )
        self._open().combine(
            self._stream(),
            halves,
            self._num_sms,
            self._narrow(self.spec.hidden * 2, given),
            _cuda.CombineSendArgs(
                expert_out=0 if expert_out is None else expert_out.data_ptr(), reduction=which
            ),
            recv,
            handle.memory.data_ptr(),
        )

    def _regions(self) -> Tensors:
        """The rows of all receive banks in place: [banks * R * max_tokens, H], and their scales."""
        spec, group = self.spec, self._open()
        block = torch.as_tensor(
            _Bytes(group.rows_at(0), (spec.num_banks * self._padded, group.row_pitch)), device=self.device
        )
        width = spec.hidden * self._row_dtype.itemsize
        rows = block[:, :width].view(self._row_dtype)
        if not self._fp8:
            return rows, None
        begin, bytes_of_scales = group.scale_offset, self._groups * 4
        return rows, block[:, begin : begin + bytes_of_scales].view(self._scale_dtype)


class _Bytes:
    """Device memory that the exchange owns, as other libraries understand it."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def raise_status(status: tuple[int, str, str, int, int, int, int], spec: ExchangeSpec) -> None:
    """Raises what (code, op, phase, rank, peer, expected, seen) of csrc/ep/status.hpp means."""
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
