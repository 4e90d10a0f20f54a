"""DeepEP's high-throughput calls of a Buffer: layout, dispatch and combine of many tokens at once.

Checks arguments and runs a BulkExchange on the communication stream. A handle holds all that a later call
needs, so it can be used any number of times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from ep_server.compat.deep_ep.events import Config, EventHandle, EventOverlap, HostStreams, Streams
from ep_server.errors import InvalidArgument
from ep_server.exchange.bulk import Arrival, BulkExchange, Plan, Returned, Routing, Rows
from ep_server.exchange.validate import CPU, check_is_tensor, check_tensor

T = TypeVar("T")
ROW_UNIT = 16  # bytes
MAX_CHOICES = 32  # a warp handles the choices of a token at once
Bias = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
DispatchResult = tuple[
    torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    torch.Tensor | None,
    torch.Tensor | None,
    list[int] | None,
    "NormalHandle | None",
    EventOverlap,
]


LayoutResult = tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]


class NormalHandle(NamedTuple):
    """What dispatch returns for combine and for a dispatch along the same routes.

    rank_prefix_matrix: [R, R] int32, [s, d] = tokens that sources 0 .. s send to rank d.
    channel_prefix_matrix, recv_channel_prefix_matrix: [R, 1] int32; there is one channel: tokens sent to each
      rank, and where those of each source begin among them.
    recv_src_idx: [N] int32, token number of each received row at its source.
    is_token_in_rank: [T, R] bool. send_head: [T, R] int32, number of the row among those for a rank, or -1.
    """

    rank_prefix_matrix: torch.Tensor
    channel_prefix_matrix: torch.Tensor
    recv_channel_prefix_matrix: torch.Tensor
    recv_src_idx: torch.Tensor
    is_token_in_rank: torch.Tensor
    send_head: torch.Tensor

    @property
    def plan(self) -> Plan:
        """As the exchange knows it."""
        return Plan(self.rank_prefix_matrix, self.send_head)


@dataclass(frozen=True, slots=True)
class Order:
    """When a call runs: after an event instead of the current stream; with an event instead of a wait."""

    after: EventOverlap | None
    asynchronous: bool

    def __post_init__(self) -> None:
        if not isinstance(self.after, EventOverlap | None):
            raise InvalidArgument("previous_event", self.after, "an EventOverlap or None")

    @property
    def event(self) -> EventHandle | None:
        """The event to wait for."""
        return None if self.after is None else self.after.event


@dataclass(frozen=True, slots=True)
class NormalDispatch:
    """Arguments of Buffer.dispatch, checked.

    rows: x: [T, H] bfloat16, or (float8_e4m3fn [T, H], scales float32 or int32 [T, G] of any strides), with
      topk_idx [T, K] int64 and topk_weights [T, K] float32 if they are sent along.
    routing: is_token_in_rank and num_tokens_per_expert of get_dispatch_layout, and expert_alignment: the
      returned counts are rounded up to multiples of it. None = along the routes of `handle`.
    num_worst_tokens: receive so many rows, whether sent or not. On the GPUs of one host the call then waits
      for nothing. 0 = as many as are sent.
    """

    rows: Rows
    routing: Routing | None
    handle: NormalHandle | None
    num_worst_tokens: int


class NormalSession:
    """One BulkExchange of a Buffer.

    Args:
        streams: of the device, shared by all sessions of a Buffer.
    """

    def __init__(
        self, exchange: BulkExchange, rank: int, num_ranks: int, streams: Streams | HostStreams
    ) -> None:
        self._exchange, self._rank, self._num_ranks, self._streams = exchange, rank, num_ranks, streams
        self.reset, self.close = exchange.reset, exchange.close

    def dispatch(self, call: NormalDispatch, num_sms: int, order: Order) -> DispatchResult:
        """Along new routes it waits for the number of rows, unless num_worst_tokens gives a limit."""
        rows, routing = call.rows, call.routing
        if routing is None:
            assert call.handle is not None
            return self._dispatch_again(rows, call.handle, num_sms, order)
        worst, local = call.num_worst_tokens, routing.expert_tokens.shape[0] // self._num_ranks

        def work() -> tuple[Rows, list[int], NormalHandle]:
            plan, report = self._exchange.plan(routing, report=worst == 0)
            count, counts = report if report is not None else (worst, [])
            arrival = Arrival(count, local, worst=worst > 0, with_sources=True)
            received, sources = self._exchange.dispatch(rows, plan, arrival, num_sms)
            assert sources is not None
            return received, counts, self._handle(plan, sources, routing.in_rank)

        (received, counts, handle), event = self._communicate(work, order)
        used = (*_tensors(rows), routing.in_rank, routing.expert_tokens)
        made = (*_tensors(received), *handle)
        return self._result(received, counts, handle, self._event(event, used, made))

    def _dispatch_again(self, rows: Rows, handle: NormalHandle, num_sms: int, order: Order) -> DispatchResult:
        arrival = Arrival(handle.recv_src_idx.shape[0])
        (received, _), event = self._communicate(
            lambda: self._exchange.dispatch(rows, handle.plan, arrival, num_sms), order
        )
        used = (*_tensors(rows), handle.rank_prefix_matrix, handle.send_head)
        return self._result(received, None, None, self._event(event, used, _tensors(received)))

    def combine(
        self, returned: Returned, handle: NormalHandle, num_sms: int, order: Order
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Waits for nothing on the GPUs of one host."""
        (out, weights), event = self._communicate(
            lambda: self._exchange.combine(returned, handle.plan, num_sms), order
        )
        used = (returned.x, returned.weights, *returned.bias, handle.rank_prefix_matrix, handle.send_head)
        return out, weights, self._event(event, used, (out, weights))

    def _communicate(self, work: Callable[[], T], order: Order) -> tuple[T, EventHandle | None]:
        return self._streams.communicate(work, asynchronous=order.asynchronous, after=order.event)

    def _handle(self, plan: Plan, sources: torch.Tensor, in_rank: torch.Tensor) -> NormalHandle:
        prefix, rank = plan.prefix, self._rank
        sent = prefix[rank] - prefix[rank - 1] if rank else prefix[0]
        begins = torch.cat([torch.zeros_like(prefix[:1, rank]), prefix[:-1, rank]])
        return NormalHandle(prefix, sent.view(-1, 1), begins.view(-1, 1), sources, in_rank, plan.places)

    def _result(
        self, received: Rows, counts: list[int] | None, handle: NormalHandle | None, event: EventOverlap
    ) -> DispatchResult:
        x = received.x if received.scales is None else (received.x, received.scales)
        return x, received.ids, received.weights, counts, handle, event

    def _event(
        self,
        event: EventHandle | None,
        used: tuple[torch.Tensor | None, ...],
        made: tuple[torch.Tensor | None, ...],
    ) -> EventOverlap:
        """Keeps memory of both streams from reuse: `made` belongs to the communication stream."""
        self._streams.record_result(*made)
        if event is None:
            return EventOverlap()
        self._streams.record_use(*used)
        return EventOverlap(event, used)


def layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """num_tokens_per_rank [R] int32, num_tokens_per_expert [E] int32, is_token_in_rank [T, R] bool.

    Ids out of range count as no expert.
    """
    tokens, device, local = topk_idx.shape[0], topk_idx.device, num_experts // num_ranks
    ids = torch.where(topk_idx < num_experts, topk_idx, -1)
    ranks = torch.where(ids < 0, num_ranks, ids // local)
    in_rank = torch.zeros((tokens, num_ranks + 1), dtype=torch.bool, device=device)
    in_rank.scatter_(1, ranks, True)
    in_rank = in_rank[:, :num_ranks].contiguous()
    flat = torch.where(ids < 0, num_experts, ids).view(-1)
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    per_expert.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return in_rank.sum(0, dtype=torch.int32), per_expert[:num_experts], in_rank


def checked_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int, streams: Streams | HostStreams, order: Order
) -> LayoutResult:
    """What get_dispatch_layout returns. Raises InvalidArgument."""
    check_is_tensor("topk_idx", topk_idx)
    if topk_idx.dim() != 2 or topk_idx.dtype is not torch.int64:
        raise InvalidArgument("topk_idx", f"{topk_idx.dtype} {list(topk_idx.shape)}", "int64 [T, K]")
    if num_experts < num_ranks or num_experts % num_ranks:
        raise InvalidArgument("num_experts", num_experts, f"a multiple of {num_ranks} ranks")
    _check_ids(topk_idx, num_experts)
    found, event = streams.communicate(
        lambda: layout(topk_idx, num_experts, num_ranks), asynchronous=order.asynchronous, after=order.event
    )
    streams.record_result(*found)
    if event is not None:
        streams.record_use(topk_idx)
    ranks, experts, in_rank = found
    return ranks, None, experts, in_rank, EventOverlap(event, (topk_idx,))


def rows_of(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> Rows:
    """The rows that a dispatch sends. Raises InvalidArgument for tensors of wrong types or shapes."""
    values, scales = x if isinstance(x, tuple) else (x, None)
    check_is_tensor("x", values)
    if values.dim() != 2:
        raise InvalidArgument("x", list(values.shape), "[T, H]")
    (tokens, hidden), device = values.shape, values.device
    wanted = torch.bfloat16 if scales is None else torch.float8_e4m3fn
    check_tensor("x", values, device, wanted, T=tokens, H=hidden)
    _check_rows(values)
    if scales is not None:
        check_is_tensor("x[1]", scales)
        if scales.dim() != 2 or scales.shape[0] != tokens or scales.itemsize != 4 or scales.device != device:
            given = f"{scales.dtype} {list(scales.shape)} on {scales.device}"
            raise InvalidArgument("x[1]", given, f"float32 or int32 [{tokens}, G] on {device}")
    if (ids is None) != (weights is None):
        raise InvalidArgument("topk_idx, topk_weights", "one of them", "both or none")
    if ids is not None and weights is not None:
        check_is_tensor("topk_idx", ids)
        choices = ids.shape[-1]
        check_tensor("topk_idx", ids, device, torch.int64, T=tokens, K=choices)
        check_tensor("topk_weights", weights, device, torch.float32, T=tokens, K=choices)
        if choices > MAX_CHOICES:
            raise InvalidArgument("topk_idx", f"{choices} choices", f"at most {MAX_CHOICES}")
    return Rows(values, scales, ids, weights)


def dispatch_call(
    rows: Rows,
    handle: object,
    given: tuple[torch.Tensor | None, torch.Tensor | None],
    alignment: int,
    num_worst_tokens: int,
    num_ranks: int,
) -> NormalDispatch:
    """Along the routes of `handle`, or if it is None of `given`: is_token_in_rank, num_tokens_per_expert.

    Raises: InvalidArgument.
    """
    if not isinstance(num_worst_tokens, int) or num_worst_tokens < 0:
        raise InvalidArgument("num_worst_tokens", num_worst_tokens, "an integer, at least 0")
    if handle is None:
        return NormalDispatch(rows, _routing(given, rows, num_ranks, alignment), None, num_worst_tokens)
    if rows.ids is not None:
        raise InvalidArgument("topk_idx", "given", "None with a handle")
    known = handle_of(handle, rows.x.device, rows.x.shape[0], num_ranks)
    return NormalDispatch(rows, None, known, 0)


def _routing(
    given: tuple[torch.Tensor | None, torch.Tensor | None], rows: Rows, num_ranks: int, alignment: int
) -> Routing:
    in_rank, per_expert = given
    if in_rank is None or per_expert is None:
        needed = "as get_dispatch_layout returns them, or a handle"
        raise InvalidArgument("is_token_in_rank, num_tokens_per_expert", "missing", needed)
    if not isinstance(alignment, int) or alignment < 1:
        raise InvalidArgument("expert_alignment", alignment, "an integer, at least 1")
    tokens, device = rows.x.shape[0], rows.x.device
    check_tensor("is_token_in_rank", in_rank, device, torch.bool, T=tokens, R=num_ranks)
    check_is_tensor("num_tokens_per_expert", per_expert)
    experts = per_expert.shape[0]
    check_tensor("num_tokens_per_expert", per_expert, device, torch.int32, E=experts)
    if experts % num_ranks:
        raise InvalidArgument("num_tokens_per_expert", experts, f"of a multiple of {num_ranks} experts")
    if rows.ids is not None:
        _check_ids(rows.ids, experts)
    return Routing(in_rank, per_expert, alignment)


def handle_of(handle: object, device: torch.device, tokens: int | None, num_ranks: int) -> NormalHandle:
    """The handle that a caller gives back. Raises InvalidArgument."""
    if not isinstance(handle, tuple | list) or len(handle) != len(NormalHandle._fields):
        raise InvalidArgument("handle", type(handle).__name__, "as dispatch returned it")
    known = NormalHandle(*handle)
    prefix, head = known.rank_prefix_matrix, known.send_head
    check_tensor("handle[0]", prefix, device, torch.int32, R=num_ranks, of=num_ranks)
    check_is_tensor("handle[5]", head)
    check_tensor(
        "handle[5]", head, device, torch.int32, T=head.shape[0] if tokens is None else tokens, R=num_ranks
    )
    return known


def sms_of(config: Config) -> int:
    """Multiprocessors of a call. Raises InvalidArgument for what is no Config."""
    if not isinstance(config, Config):
        raise InvalidArgument("config", config, "a Config or None")
    return config.num_sms


def returned_of(x: torch.Tensor, weights: torch.Tensor | None, bias: Bias, handle: NormalHandle) -> Returned:
    """What a combine returns. Raises InvalidArgument."""
    check_is_tensor("x", x)
    rows, device, tokens = handle.recv_src_idx.shape[0], x.device, handle.send_head.shape[0]
    if x.dim() != 2:
        raise InvalidArgument("x", list(x.shape), "[N, H]")
    hidden = x.shape[1]
    check_tensor("x", x, device, torch.bfloat16, N=rows, H=hidden)
    _check_rows(x)
    if weights is not None:
        check_is_tensor("topk_weights", weights)
        check_tensor("topk_weights", weights, device, torch.float32, N=rows, K=weights.shape[-1])
        if weights.shape[-1] > MAX_CHOICES:
            raise InvalidArgument("topk_weights", f"{weights.shape[-1]} choices", f"at most {MAX_CHOICES}")
    given = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else tuple(bias)
    for each in given:
        check_tensor("bias", each, device, torch.bfloat16, T=tokens, H=hidden)
        _check_rows(each)
    return Returned(x, weights, given)


def _check_ids(ids: torch.Tensor, experts: int) -> None:
    """Raises InvalidArgument for an expert that there is not; on GPUs that would be a wait."""
    if ids.device == CPU and ids.numel() and (most := int(ids.max())) >= experts:
        raise InvalidArgument("topk_idx", most, f"below {experts}, the number of experts, or -1")


def _check_rows(x: torch.Tensor) -> None:
    """Raises InvalidArgument for rows that do not lie in words of ROW_UNIT bytes."""
    row_bytes = x.shape[1] * x.itemsize
    if row_bytes == 0 or row_bytes % ROW_UNIT or x.data_ptr() % ROW_UNIT:
        raise InvalidArgument("x", f"rows of {row_bytes} bytes", f"at multiples of {ROW_UNIT} bytes")


def _tensors(rows: Rows) -> tuple[torch.Tensor | None, ...]:
    return rows.x, rows.scales, rows.ids, rows.weights
