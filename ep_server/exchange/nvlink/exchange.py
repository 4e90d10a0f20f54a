"""The exchange over NVLink, on CUDA tensors: one GPU per rank, one host.

Checks tensors, allocates outputs and enqueues kernels on the current stream. Nothing waits for the GPU except
COMPACT and INDEX views outside a graph, whose exact size the host needs. The next call, check() or
synchronize() raises failures that a kernel finds. A rank publishes which of its banks are free when its next
kernel starts, in barrier() and in synchronize(). Everything can be captured in a CUDA graph and replayed.
Sends of one exchange follow one another in stream order. Durations in ns.

Beyond the Protocol: tokens_on_device, synchronize(), set_faults(), inject_delay() and api.FusedExchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Unpack

import torch

from ep_server import _cuda
from ep_server.errors import ConfigError, InvalidArgument, StartupError
from ep_server.exchange.api import (
    AddNorm,
    Capabilities,
    Exchange,
    ExchangeStatistics,
    FusedExchange,
    Membership,
    Payload,
    PendingCombine,
    PendingDispatch,
    Received,
    RecvOptions,
    Reduction,
    View,
    Wire,
    chosen,
)
from ep_server.exchange.bootstrap import Standing, share_anew, share_regions
from ep_server.exchange.device_wait import await_current, await_idle, longest_wait
from ep_server.exchange.faults import Fault, encode_device_faults
from ep_server.exchange.host import HostGroup
from ep_server.exchange.nvlink.banks import BOTH, COMBINE, DISPATCH, RECV, SEND, Banks, DeviceHandle
from ep_server.exchange.nvlink.delay import NvlinkDelay
from ep_server.exchange.nvlink.ends import begins, end
from ep_server.exchange.nvlink.launch import CombineTensors, Launcher, address, check_device_spec, make_group
from ep_server.exchange.nvlink.normal import NvlinkNormal
from ep_server.exchange.nvlink.sizes import has_normal, heap_bytes
from ep_server.exchange.shapes import Shapes, Tensors
from ep_server.exchange.spec import ExchangeSpec
from ep_server.exchange.validate import (
    CombineMode,
    check_combine_weights,
    check_dispatch,
    check_ids,
    check_tensor,
    combine_mode,
    handle_of,
    rank_bits,
)


class NvlinkExchange:
    """One rank's end of a group of GPUs. Satisfies api.FusedExchange and api.Membership.

    Calls are made with `device` current. Where two streams may wait for peers at once, num_sms must leave
    room for the sends behind them: at most half of the GPU each.

    Args:
        spec: this rank's; the other ranks' differ in `rank` only.
        control: the group of control_spec(spec) over the same ranks; owned by the exchange from now on.
          all_gather, barrier and reset run there: every rank calls them, each from a thread of its own.
          The ranks that it masks are absent until a reset().
        device: GPU ordinal; None = the current one.
        on_timeout: "raise" aborts the group; "mask" continues without the peer.
        num_sms: multiprocessors that a kernel may fill; 0 = all; 1 is enough for any operation.
        validate: reads ids back and checks them before anything is sent; for tests, it waits for the GPU.
        joins: the others run already; this rank masks them until all call reset().
        many: also for many rows at once (NvlinkNormal), where the spec allows; the same on all ranks.
    Raises: ConfigError; StartupError where a GPU, its driver or peer access is missing.
    """

    def __init__(
        self,
        spec: ExchangeSpec,
        *,
        control: HostGroup,
        device: int | None = None,
        on_timeout: str = "raise",
        num_sms: int = 0,
        validate: bool = False,
        joins: bool = False,
        many: bool = False,
    ) -> None:
        self.spec, self._control, self._validate = spec, control, validate
        self._heap_bytes = heap_bytes(spec) if many and on_timeout == "raise" and has_normal(spec) else 0
        self._fresh = joins  # has attached no region of the others yet
        with begins(spec, control):
            self._launcher: Launcher | None = self._start(device, on_timeout, num_sms)
        self._banks = Banks(spec.rank, spec.num_banks)
        self._normal = NvlinkNormal(self, self._open) if self._heap_bytes else None

    def _start(self, device: int | None, on_timeout: str, num_sms: int) -> Launcher:
        check_device_spec(self.spec, on_timeout)
        if not torch.cuda.is_available():
            raise StartupError("the exchange over NVLink needs a CUDA device, none is available")
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        with torch.cuda.device(self.device):
            self.shapes = Shapes(self.spec, self.device, aligned=True)
            group = make_group(self.spec, self.device, on_timeout, self._heap_bytes)
            launcher = Launcher(group, self.spec, self.shapes, num_sms)
            others = set(range(self.spec.num_ranks)) - {self.spec.rank}
            if absent := others if self._fresh else self._control.masked:
                group.reset(0, rank_bits(self.spec, absent))
            if not self._fresh:  # else what aborted the others does not concern this rank until it is in
                share_regions(self._control, self.spec, group)
                group.watch(self._control.native.head, self._control.native)
        return launcher

    @property
    def fused(self) -> FusedExchange:
        """As the Protocol says."""
        return self

    @property
    def normal(self) -> Exchange | None:
        """As the Protocol says."""
        return self._normal

    @property
    def capabilities(self) -> Capabilities:
        """As the Protocol says."""
        return Capabilities(
            payloads=frozenset(Payload) - {Payload.FP32},
            views=frozenset(View),
            cheapest_view=View.INDEX,
            graph_safe=True,
            micro_batches=self.spec.num_banks,
            memory_bytes=int(self._open().group.bytes),
            fills=True,
            wires=frozenset(Wire),
        )

    # -- halves ---------------------------------------------------------------------------------------

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
        handle, send = self._begin_dispatch(x, topk_ids, topk_weights, tokens_on_device)
        self._open().dispatch(SEND, send, _cuda.DispatchRecvArgs(), handle, (x,))
        self._banks.take(DISPATCH, handle.state)
        return PendingDispatch(lambda view, options: self._open().receive(handle, None, view, options))

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
            topk_weights: where dispatch had none. With reduction rank they are pushed to the experts' ranks.
        """
        handle, mode = self._begin_combine(expert_out, received, topk_weights, reduction, wire)
        self._open().combine(SEND, handle, mode, CombineTensors(expert_out, topk_weights))
        state = handle.state
        state.held, state.combining = False, True

        def receive(out: torch.Tensor | None, wait_stats: torch.Tensor | None) -> torch.Tensor:
            self.shapes.check_wait_stats(wait_stats)
            out, launcher = self.shapes.result(handle.tokens, out), self._open()
            launcher.combine(RECV, handle, mode, CombineTensors(None, topk_weights, out, wait_stats))
            state.combining = False
            return out

        pending = PendingCombine(receive)
        self._banks.take(COMBINE, pending)
        return pending

    # -- both halves in one kernel --------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        view: View = View.PADDED,
        *,
        tokens_on_device: torch.Tensor | None = None,
        **options: Unpack[RecvOptions],
    ) -> Received:
        """As the Protocol says. tokens_on_device: see dispatch_send."""
        view = chosen("view", View, view)
        handle, send = self._begin_dispatch(x, topk_ids, topk_weights, tokens_on_device)
        received = self._open().receive(handle, (send, x), view, options)
        self._banks.take(DISPATCH, handle.state)
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
        """As the Protocol says."""
        handle, mode = self._begin_combine(expert_out, received, topk_weights, reduction, wire)
        self.shapes.check_wait_stats(wait_stats)
        out, launcher = self.shapes.result(handle.tokens, out), self._open()
        if add_norm is not None:
            launcher.check_norm(handle.tokens, add_norm, mode.wire)
        tensors = CombineTensors(expert_out, topk_weights, out, wait_stats, next_reads_ahead, add_norm)
        launcher.combine(BOTH, handle, mode, tensors)
        handle.state.held = False
        self._banks.take(COMBINE, None)
        return out

    def can_norm(self, norm: AddNorm) -> bool:
        """As the Protocol says."""
        return self._open().can_norm(norm)

    def bounded(self, num_sms: int) -> AbstractContextManager[Callable[[], None]]:
        """As the Protocol says, also for captured kernels. Raises ConfigError for less than 1."""
        return self._open().bounded(num_sms)

    # -- views ----------------------------------------------------------------------------------------

    def empty_padded(self) -> Tensors:
        """As the Protocol says; each scale column starts at a multiple of 16 bytes."""
        return self.shapes.padded()

    def release(self, received: Received) -> None:
        """As the Protocol says."""
        handle: DeviceHandle = handle_of(received, self._open().generation)
        if handle.state.held:
            self._open().release(handle)
            handle.state.held = False

    # -- the group ------------------------------------------------------------------------------------

    def all_gather(self, record: bytes) -> list[bytes]:
        """As the Protocol says; over host memory."""
        return self._control.all_gather(record)

    def barrier(self) -> None:
        """As the Protocol says, of the processes and not of their streams."""
        self._open().publish()
        if not self._fresh:  # else the others are masked
            self._control.barrier()

    def check(self) -> None:
        """Raises what a kernel has found since the last call; never waits.

        Raises: PeerTimeout, HookNotCalled, GroupAborted, ProtocolViolation, InvalidArgument.
        """
        self._open().check()

    def synchronize(self) -> None:
        """Waits for the current stream, then check(). Raises: InternalError if that does not end its work."""
        self._open().publish()
        await_current(self.device, longest_wait(self.spec), "operations of the exchange")
        self.check()

    def close(self) -> None:
        """As the Protocol says. Waits for the GPU, as ends.end()."""
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            end(self.spec, self._control, self.device, launcher.group)

    @property
    def membership(self) -> Membership:
        """As the Protocol says."""
        return self

    @property
    def masked(self) -> frozenset[int]:
        """See Membership. Waits for nothing: kernels may mask more."""
        bits = self._open().group.epochs()[2]
        return frozenset(r for r in range(self.spec.num_ranks) if bits >> r & 1)

    @property
    def live(self) -> frozenset[int]:
        """See Membership."""
        return frozenset(range(self.spec.num_ranks)) - self.masked

    def mask(self, ranks: Iterable[int]) -> None:
        """See Membership. Also in a kernel that waits for them."""
        self._open().group.mask(rank_bits(self.spec, set(ranks) - {self.spec.rank}))

    def reset(self, dead: Iterable[int] = (), generation: int = 0) -> None:
        """See Membership. Ends the GPU's waits. Raises: as its parts; InternalError if the GPU goes on."""
        launcher, gone = self._open(), frozenset(dead)
        launcher.group.abort()  # kernels may wait for a lost rank
        await_idle(self.device)
        self._control.reset(gone, generation)
        standing = Standing(launcher.last_epoch(), self._fresh)
        last = share_anew(self._control, self.spec, launcher.group, standing)
        if self._fresh:
            launcher.group.watch(self._control.native.head, self._control.native)
        self._fresh = False
        banks = self.spec.num_banks
        base = (last + 3 * banks) // banks * banks  # beyond every epoch of the old generation
        launcher.group.reset(base, rank_bits(self.spec, gone))
        launcher.generation = object()
        self._banks = Banks(self.spec.rank, banks)
        self._control.barrier()

    def set_faults(self, faults: Iterable[Fault]) -> None:
        """Replaces the fault plan: delays and drops where a send writes. No kernel may be running."""
        self._open().group.set_faults(encode_device_faults(faults, self.spec))

    def inject_delay(self, delay_seconds: float) -> NvlinkDelay:
        """Makes what peers send visible so much later, for measurements; see NvlinkDelay. Collective;
        no operation may be running. Raises: ConfigError."""
        if self._normal is not None:
            raise ConfigError("delay_seconds", delay_seconds, "of an exchange without those for many rows")
        return self._open().inject_delay(delay_seconds, self._control.barrier)

    def statistics(self) -> ExchangeStatistics:
        """As the Protocol says. Kept on the GPU and copied on a stream of their own."""
        return self._open().statistics()

    def __repr__(self) -> str:
        spec, what = self.spec, f"{self.device}, {self.spec.payload}, {self.spec.reduction}"
        return f"NvlinkExchange(rank={spec.rank}/{spec.num_ranks}, {what})"

    def _open(self) -> Launcher:
        if self._launcher is None:
            raise InvalidArgument("exchange", "closed", "open")
        return self._launcher

    def _begin_dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, count: torch.Tensor | None
    ) -> tuple[DeviceHandle, _cuda.DispatchSendArgs]:
        launcher = self._open()
        tokens = check_dispatch(self.spec, self.shapes.device, x, ids, weights, pushes_weights=True)
        if count is not None:
            check_tensor("tokens_on_device", count, self.shapes.device, torch.int32, tokens=1)
        if self._validate:
            check_ids(self.spec, ids)
        launcher.check()
        self._banks.check(DISPATCH)
        send = _cuda.DispatchSendArgs(
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            weights=address(weights),
            tokens_on_device=address(count),
            tokens=tokens,
        )
        return launcher.new_handle(tokens, weighted=weights is not None), send

    def _begin_combine(
        self,
        expert_out: torch.Tensor,
        received: Received,
        weights: torch.Tensor | None,
        reduction: Reduction | None,
        wire: Wire,
    ) -> tuple[DeviceHandle, CombineMode]:
        launcher = self._open()
        mode = combine_mode(self.spec, reduction, wire, frozenset(Wire))
        handle: DeviceHandle = handle_of(received, launcher.generation)
        if handle.state.combining:
            raise InvalidArgument(
                "received.handle", "of a combine whose hook was not called", "of one at a time"
            )
        self.shapes.check_outputs(expert_out, received.view, handle.state.rows)
        check_combine_weights(
            self.spec, self.shapes.device, handle, weights, mode.reduction, pushes_weights=True
        )
        launcher.check()
        self._banks.check(COMBINE)
        return handle, mode
