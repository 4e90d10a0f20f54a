"""The exchange between hosts for tensors of a device. An exchange on the CPU carries routing and headers.

How rows travel is the staging: through pinned host memory (host_staging.py), or directly between the NIC and
the memory of the device (gpu_direct.py). Rows are spread over the experts on the device. The host takes part
in each half, so none can be captured into a CUDA graph.

Beyond the Protocol: `inner`, whose membership, faults and failures are those of shm.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Store

from ep_server.errors import ConfigError, InvalidArgument
from ep_server.exchange.api import (
    Capabilities,
    ExchangeSpec,
    ExchangeStatistics,
    Membership,
    Received,
    Reduction,
    View,
)
from ep_server.exchange.fabric import bootstrap as fabric_bootstrap
from ep_server.exchange.fabric.copies import Copies, checked_device, copies_for, refuse_capture
from ep_server.exchange.fabric.exchange import FabricOptions
from ep_server.exchange.fabric.gpu_direct import GpuDirect, RowsFabric
from ep_server.exchange.fabric.host_staging import Answers, Brought, HostStaging, Outgoing, Wanted
from ep_server.exchange.row_order import Form, Order
from ep_server.exchange.segment import HostShare
from ep_server.exchange.shm import PendingCombine as InnerCombine
from ep_server.exchange.shm import PendingDispatch as InnerDispatch
from ep_server.exchange.shm import ShmExchange
from ep_server.exchange.validate import check_tensor_on
from ep_server.exchange.waiting import Waiting


@dataclass(frozen=True, slots=True)
class Handle:
    """What combine_send needs. inner: as the inner exchange received it. order: on the device. tokens: T."""

    inner: Received
    order: Order
    tokens: int
    owner: FabricDeviceExchange


class PendingDispatch:
    """A dispatch whose send half has run. See exchange.PendingDispatch."""

    __slots__ = ("_exchange", "_tokens", "inner")

    def __init__(self, exchange: FabricDeviceExchange, inner: InnerDispatch, tokens: int) -> None:
        self._exchange, self.inner, self._tokens = exchange, inner, tokens

    def recv(self, view: View = View.COMPACT) -> Received:
        """As the Protocol says, on the caller's stream. INDEX rows are a copy, reordered: see row_ids."""
        view = checked_view(view)
        return self._exchange.finish_recv(self.inner.recv(View.INDEX), self._tokens, view)

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each source's header."""
        return self.inner.wait_ns


class PendingCombine:
    """A combine whose send half has run. See exchange.PendingCombine."""

    __slots__ = ("_exchange", "_inner", "_tokens")

    def __init__(self, exchange: FabricDeviceExchange, inner: InnerCombine, tokens: int) -> None:
        self._exchange, self._inner, self._tokens = exchange, inner, tokens

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """As the Protocol says, on the caller's stream."""
        return self._exchange.copy_result(self._inner, self._tokens, out)

    @property
    def wait_ns(self) -> torch.Tensor:
        """[R] int64 on the CPU: how long recv() waited for each rank's header."""
        return self._inner.wait_ns


def checked_view(view: View | str) -> View:
    """The view of this name, or InvalidArgument."""
    try:
        return View(view)
    except ValueError:
        raise InvalidArgument("view", view, f"one of {', '.join(View)}") from None


class Staging(StrEnum):
    """How rows of a device reach the network. All ranks choose alike."""

    HOST = "host"  # through pinned host memory
    GPU_DIRECT = "gpu_direct"  # the NIC reads and writes the device's memory


class RowStaging(Protocol):
    """One way between rows of the device and the network."""

    def begin_dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> Outgoing[InnerDispatch]:
        """Begins the copies of a dispatch. Tensors were checked."""
        ...

    def begin_combine(self, answers: Answers) -> Outgoing[InnerCombine]:
        """Begins the copies of a combine."""
        ...

    def bring(self, inner: Received, wanted: Wanted) -> Brought:
        """What came, as rows and tables on the device. inner: an INDEX view; its bank is given back."""
        ...

    def result(self, inner: InnerCombine, tokens: int, out: torch.Tensor | None) -> torch.Tensor:
        """The sums of a combine, on the device."""
        ...

    def drain(self) -> None:
        """Returns once no copy and no kernel reads any of it."""
        ...

    @property
    def memory_bytes(self) -> int:
        """On the device."""
        ...

    @property
    def staging_bytes(self) -> int:
        """On the host."""
        ...


class FabricDeviceExchange:
    """One rank's end of a group. Satisfies exchange.Exchange on tensors of `device`.

    Args:
        inner: an exchange on CPU tensors, which this one owns from now on.
        device: of all tensors given and returned; "cpu" works too.
        staging: how rows of the device reach the network. GPU_DIRECT needs an inner exchange with rows there.
        copies: in place of those of the device; for tests.
    Raises: ConfigError; StartupError where the device is not there.
    """

    def __init__(
        self,
        inner: ShmExchange,
        device: torch.device | str | int,
        *,
        staging: Staging = Staging.HOST,
        copies: Copies | None = None,
    ) -> None:
        self.inner, self.spec, self.fused = inner, inner.spec, None
        try:
            self.device = checked_device(device)
            self._copies = copies or copies_for(self.device, self.spec.timeout_ns)
            self.staging = self._open_staging(staging)
            self.form = Form(self.device, inner.combine_dtype, self.spec.hidden, inner.views.padded_rows)
        except BaseException:
            inner.abort()  # else the others would wait for this rank
            inner.close()
            raise
        self.combine_dtype = inner.combine_dtype

    def _open_staging(self, staging: Staging) -> RowStaging:
        if staging is Staging.HOST:
            return HostStaging(self.inner, self._copies)
        if not isinstance(self.inner, RowsFabric):
            raise ConfigError("staging", str(staging), "host, where rows are not registered on a device")
        return GpuDirect(self.inner, self._copies)

    # -- the Protocol ---------------------------------------------------------------------------------

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> PendingDispatch:
        """As the Protocol says. Waits for the caller's stream; then tensors may be overwritten."""
        return self.begin_dispatch(x, topk_ids, topk_weights).send()

    def combine_send(
        self,
        expert_out: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        reduction: Reduction | None = None,
    ) -> PendingCombine:
        """As the Protocol says. Waits for the caller's stream; then tensors may be overwritten.

        Args:
            reduction: see ShmExchange.combine_send.
        """
        handle = received.handle
        if not isinstance(handle, Handle) or handle.owner is not self:
            raise InvalidArgument("received.handle", handle, "of a dispatch of this exchange")
        rows = handle.order.answers(expert_out, received.view, self.form)
        answers = Answers(rows, handle.inner, handle.tokens, topk_weights, reduction)
        return self.begin_combine(answers).send()

    def all_gather(self, record: bytes) -> list[bytes]:
        """As the Protocol says."""
        return self.inner.all_gather(record)

    def barrier(self) -> None:
        """As the Protocol says: of the processes, not of their streams."""
        self.inner.barrier()

    def close(self) -> None:
        """As the Protocol says. Copies on their way to the device end first."""
        try:
            self.staging.drain()
        finally:
            self.inner.close()

    @property
    def membership(self) -> Membership:
        """Of the inner exchange."""
        return self.inner.membership

    def check(self) -> None:
        """Does nothing: the host takes part in each half, which raises what it finds."""

    @property
    def capabilities(self) -> Capabilities:
        """As the Protocol says."""
        return Capabilities(
            payloads=self.inner.capabilities.payloads,
            views=frozenset(View),
            cheapest_view=View.COMPACT,
            graph_safe=False,
            micro_batches=self.spec.num_banks,
            memory_bytes=self.memory_bytes,
        )

    def statistics(self) -> ExchangeStatistics:
        """Of the inner exchange."""
        return self.inner.statistics()

    def release(self, received: Received) -> None:
        """Without effect: what a view shows is a copy, its bank was given back when it was received."""

    @property
    def memory_bytes(self) -> int:
        """Device memory that is held between operations."""
        return self.staging.memory_bytes

    @property
    def staging_bytes(self) -> int:
        """Host memory of the staging, in bytes; pinned where the device is a GPU."""
        return self.staging.staging_bytes

    # -- between the halves and the device ------------------------------------------------------------

    def begin_dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> Outgoing[PendingDispatch]:
        """dispatch_send in two: checks the tensors and begins their copies; send() is the rest."""
        tokens = self.check_tokens(x, topk_ids, topk_weights)
        begun = self.staging.begin_dispatch(x, topk_ids, topk_weights)
        return begun.then(lambda sent: PendingDispatch(self, sent, tokens))

    def begin_combine(self, answers: Answers) -> Outgoing[PendingCombine]:
        """combine_send in two, of rows in the order of their entries."""
        if answers.weights is not None:
            self._check_weights(answers.weights, answers.tokens)
        begun = self.staging.begin_combine(answers)
        return begun.then(lambda sent: PendingCombine(self, sent, answers.tokens))

    def finish_recv(self, inner: Received, tokens: int, view: View) -> Received:
        """What the inner exchange received in place, on the device in this view; gives the bank back."""
        length = self.form.capacity if view is View.INDEX else 0
        brought = self.bring(inner, Wanted(length=length))
        order = Order(brought.counts, *brought.tables)
        return order.received(brought.made, view, self.form.capacity, Handle(inner, order, tokens, self))

    def bring(self, inner: Received, wanted: Wanted) -> Brought:
        """What the inner exchange received, on the device; the caller's stream comes after all copies."""
        return self.staging.bring(inner, wanted)

    def check_stream(self) -> None:
        """Raises InvalidArgument where the caller's stream is being captured: the host takes part."""
        if self.device.type == "cuda":
            refuse_capture()

    def check_tokens(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None) -> int:
        """T of a dispatch. Raises InvalidArgument for tensors that are not as the Protocol says."""
        spec, tokens = self.spec, len(x) if x.dim() == 2 else -1
        check_tensor_on(self.device, "x", x, self.combine_dtype, T=tokens, H=spec.hidden)
        if tokens > spec.max_tokens:
            raise InvalidArgument("x", f"T = {tokens}", f"at most max_tokens = {spec.max_tokens} tokens")
        check_tensor_on(self.device, "topk_ids", ids, torch.int64, T=tokens, K=spec.top_k)
        if weights is not None:
            self._check_weights(weights, tokens)
        return tokens

    def _check_weights(self, weights: torch.Tensor, tokens: int) -> None:
        check_tensor_on(self.device, "topk_weights", weights, torch.float32, T=tokens, K=self.spec.top_k)

    def copy_result(self, inner: InnerCombine, tokens: int, out: torch.Tensor | None) -> torch.Tensor:
        """The sums of a combine, on the device."""
        if out is not None:
            check_tensor_on(self.device, "out", out, self.combine_dtype, T=tokens, H=self.spec.hidden)
        return self.staging.result(inner, tokens, out)


def from_process_group(
    group: Any,
    spec: ExchangeSpec,
    device: torch.device | str | int,
    options: FabricOptions | None = None,
    waiting: Waiting | None = None,
    share: HostShare | None = None,
) -> FabricDeviceExchange:
    """fabric_bootstrap.from_process_group for tensors of `device`. Collective."""
    return _behind(fabric_bootstrap.from_process_group(group, spec, options, waiting, share), device)


def from_store(
    store: Store,
    name: str,
    spec: ExchangeSpec,
    device: torch.device | str | int,
    options: FabricOptions | None = None,
    waiting: Waiting | None = None,
    share: HostShare | None = None,
) -> FabricDeviceExchange:
    """fabric_bootstrap.from_store for tensors of `device`. Collective."""
    return _behind(fabric_bootstrap.from_store(store, name, spec, options, waiting, share), device)


def _behind(inner: ShmExchange, device: torch.device | str | int) -> FabricDeviceExchange:
    """Returns once every rank has its device and staging. Raises on all ranks if one has not."""
    exchange = FabricDeviceExchange(inner, device)
    exchange.barrier()
    return exchange
