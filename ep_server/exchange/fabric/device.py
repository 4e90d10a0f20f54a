"""The exchange between hosts for tensors of a device. An exchange on the CPU carries routing and headers.

A staging moves rows: through pinned host memory (host_staging.py), or directly between the NIC and the memory
of the device (gpu_direct.py). Rows are spread over the experts on the device. The host takes part in each
half, so none can be captured into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ep_server.exchange.api import (
    Capabilities,
    Handle,
    PendingCombine,
    PendingDispatch,
    Received,
    RecvOptions,
    Reduction,
    View,
    Wire,
)
from ep_server.exchange.fabric.copies import Copies, checked_device, copies_for, refuse_capture
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.gpu_direct import GpuDirect
from ep_server.exchange.fabric.host_staging import (
    ExpertOutputs,
    HostStaging,
    Outgoing,
    ReceivedRows,
    ReceiveSums,
    RowStaging,
)
from ep_server.exchange.host import WIRES, HostExchange
from ep_server.exchange.row_order import Order
from ep_server.exchange.shapes import Shapes, Tensors
from ep_server.exchange.validate import (
    CombineMode,
    check_combine_weights,
    check_dispatch,
    check_hints_only,
    combine_mode,
    handle_of,
)


@dataclass(frozen=True, slots=True)
class DeviceReceive:
    """State of a Handle. inner: as the inner exchange received it. order: on the device."""

    inner: Received
    order: Order


class FabricDeviceExchange:
    """One rank's end of a group. Satisfies api.Exchange on tensors of `device`.

    Args:
        inner: an exchange on CPU tensors, owned by this one from now on.
        device: of all tensors given and returned; "cpu" works too.
        rows: memory of the device that inner's link has registered; None = rows travel through host memory.
        copies: in place of those of the device; for tests.
    Raises: ConfigError; StartupError where the device is missing.
    """

    fused = normal = None

    def __init__(
        self,
        inner: HostExchange,
        device: torch.device | str | int,
        rows: DeviceRows | None = None,
        *,
        copies: Copies | None = None,
    ) -> None:
        self.inner, self.spec = inner, inner.spec
        try:
            self.device = checked_device(device)
            self._copies = copies or copies_for(self.device, self.spec.timeout_ns)
            self.staging: RowStaging = (
                HostStaging(inner, self._copies) if rows is None else GpuDirect(inner, rows, self._copies)
            )
            self.shapes = Shapes(self.spec, self.device)
        except BaseException:
            inner.group.abort()  # the others would wait for this rank
            inner.close()
            raise
        self.membership, self.statistics = inner.membership, inner.statistics
        self.all_gather, self.barrier = inner.all_gather, inner.barrier

    @property
    def capabilities(self) -> Capabilities:
        """As the Protocol says."""
        return Capabilities(
            payloads=self.inner.capabilities.payloads,
            views=frozenset(View),
            cheapest_view=View.COMPACT,
            graph_safe=False,
            micro_batches=self.spec.num_banks,
            memory_bytes=self.staging.memory_bytes,
        )

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> PendingDispatch:
        """As the Protocol says. Waits for the caller's stream; then the tensors may be overwritten."""
        inner, tokens = self.begin_dispatch(x, topk_ids, topk_weights).send(), len(x)
        weighted = topk_weights is not None

        def receive(view: View, options: RecvOptions) -> Received:
            """On the caller's stream. INDEX rows are a copy, reordered."""
            check_hints_only(options)
            return self._finish_recv(inner.recv(View.INDEX), tokens, view, weighted=weighted)

        return PendingDispatch(receive)

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
        wire: Wire = Wire.BF16,
    ) -> PendingCombine:
        """As the Protocol says. Tensors may be overwritten by the caller's stream once it returns."""
        self.check_stream()
        handle: Handle[DeviceReceive] = handle_of(received, self)
        mode = combine_mode(self.spec, reduction, wire, WIRES)
        rows = handle.state.order.outputs(expert_out, received.view, self.shapes)
        sums = self.begin_combine(rows, handle.state.inner, handle, topk_weights, mode).send()
        return PendingCombine(lambda out, wait_stats: self.copy_result(sums, handle.tokens, out, wait_stats))

    def empty_padded(self) -> Tensors:
        """As the Protocol says."""
        return self.shapes.padded()

    def release(self, received: Received) -> None:
        """Does nothing: views are copies, and a receive gives its bank back."""

    def check(self) -> None:
        """Does nothing: the host takes part in each half, which raises what it finds."""

    def close(self) -> None:
        """As the Protocol says. First, copies on their way to the device end."""
        try:
            self.staging.drain()
        finally:
            self.inner.close()

    def __repr__(self) -> str:
        return f"FabricDeviceExchange({self.inner!r}, {self.device}, {type(self.staging).__name__})"

    # -- halves in parts: HierarchicalExchange runs another send while tensors are on their way -------------

    def begin_dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> Outgoing[PendingDispatch]:
        """Checks the tensors of a dispatch and begins their copies; sends a dispatch of `inner`."""
        self.check_stream()
        check_dispatch(self.spec, self.device, x, topk_ids, topk_weights)
        return self.staging.begin_dispatch(x, topk_ids, topk_weights)

    def begin_combine(
        self,
        rows: torch.Tensor,
        inner: Received,
        handle: Handle[Any],
        weights: torch.Tensor | None,
        mode: CombineMode,
    ) -> Outgoing[ReceiveSums]:
        """Checks the weights of a combine and begins its copies. rows: [N, H] by entry of `inner`."""
        check_combine_weights(self.spec, self.device, handle, weights, mode.reduction)
        outputs = ExpertOutputs(rows, inner, handle.tokens, weights, mode.reduction)
        return self.staging.begin_combine(outputs)

    def copy_result(
        self, sums: ReceiveSums, tokens: int, out: torch.Tensor | None, wait_stats: torch.Tensor | None
    ) -> torch.Tensor:
        """The sums of a combine, on the device. Raises InvalidArgument."""
        check_hints_only({"wait_stats": wait_stats})
        return sums(None if out is None else self.shapes.result(tokens, out))

    def check_stream(self) -> None:
        """Raises InvalidArgument where the caller's stream is being captured: the host takes part."""
        if self.device.type == "cuda":
            refuse_capture()

    def _finish_recv(self, inner: Received, tokens: int, view: View, *, weighted: bool) -> Received:
        length = self.shapes.padded_rows if view is View.INDEX else 0
        found: ReceivedRows = self.staging.copy_received(inner, length=length)
        order = Order(found.counts, *found.tables)
        handle = Handle(self, tokens, weighted, DeviceReceive(inner, order))
        return order.received(found.rows, view, self.shapes, handle)
