"""DeepEP's Buffer without NVSHMEM and IBGDA.

Names, argument meanings, shapes and return values are DeepEP's. Inside a host CPU tensors travel over shared
memory, CUDA tensors of one process per GPU over NVLink. Differences:

- Results are packed in one fixed order: expert, source rank, source token.
- Waiting times are nanoseconds.
- More than two results may be held (sessions.NUM_BANKS).
- The first call of new sizes allocates their memory.
- Weights may be given to dispatch. Every rank then sums its experts' outputs before they return. On GPUs it
  always does.
- Unmasking a rank is collective.
- High-throughput calls receive into num_nvl_bytes of GPU memory, and need no chunk sizes.
- Low-latency calls join the ranks of one host. High-throughput calls go to other hosts over libfabric: they
  wait for the device then, cannot be captured, and take memory beside num_nvl_bytes.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ep_server.compat.deep_ep import normal
from ep_server.compat.deep_ep.bootstrap import Network
from ep_server.compat.deep_ep.events import Config, EventHandle, EventOverlap, Streams
from ep_server.compat.deep_ep.session import CombineCall, Completion, DispatchCall, Hook, Operation
from ep_server.compat.deep_ep.sessions import Options, Sessions, Sizes, payload_of, size_hint
from ep_server.errors import InvalidArgument, StartupError
from ep_server.exchange.validate import check_is_tensor, check_tensor

topk_idx_t = torch.int64

Handle = tuple[torch.Tensor, torch.Tensor, int, int, int]


class Buffer:
    """One rank's end of a group of ranks that exchange tokens for their experts.

    Args:
        group: torch.distributed process group.
        num_rdma_bytes: limit of one session's memory on this rank; 0 = none. See
          get_low_latency_rdma_size_hint.
        low_latency_mode: must be True for the low_latency_* calls.
        explicitly_destroy: destroy() may be called. Otherwise memory is freed with the object.
        enable_shrink: mask a rank that misses a deadline instead of raising PeerTimeout.
        comm: an MPI communicator instead of a group; not supported.
        timeout_seconds: deadline of every wait for a rank.
        low_latency_num_sms: multiprocessors of a GPU that one call may fill; 0 = all.
        num_nvl_bytes: GPU memory of high-throughput calls; see Config.get_nvl_buffer_size_hint.
        network: of several hosts; None = each kernel is a host, and libfabric chooses.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: accepted
          and ignored.

    On GPUs of one host no call waits for the device. Each can be captured in a CUDA graph once a call of the
    same sizes has run outside of one. The next call raises what a kernel finds: bad ids, a missed deadline.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        timeout_seconds: float = 10.0,
        low_latency_num_sms: int = 0,
        network: Network | None = None,
    ) -> None:
        if group is None or comm is not None:
            raise InvalidArgument("group, comm", (group, comm), "a torch.distributed process group and None")
        options = Options.checked(
            shrink=enable_shrink,
            timeout_seconds=timeout_seconds,
            limit=num_rdma_bytes,
            num_sms=low_latency_num_sms,
            heap_bytes=num_nvl_bytes,
            network=network or Network(),
        )
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy = explicitly_destroy
        self._sessions = Sessions(group, options)
        self._operations: MutableMapping[torch.Tensor, Operation] = WeakIdKeyDictionary()  # by src_info

    def destroy(self) -> None:
        """Frees all memory. Requires explicitly_destroy=True. Returned tensors stay valid."""
        if not self.explicitly_destroy:
            raise InvalidArgument("explicitly_destroy", False, "True, given to the constructor")
        self._sessions.close()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the multiprocessors of calls of dispatch and combine without a Config, an even number."""
        if new_num_sms < 2 or new_num_sms % 2:
            raise InvalidArgument("new_num_sms", new_num_sms, "even, at least 2")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event at the current point of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether FP8 rows can be sent: yes, on any device."""
        return True

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of the current GPU on which calls without a hook run."""
        if not torch.cuda.is_available():
            raise StartupError("there is no CUDA device, so there is no communication stream")
        streams = self._sessions.streams(torch.device("cuda", torch.cuda.current_device()))
        assert isinstance(streams, Streams)
        return streams.communication

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes per rank that suffice for low-latency calls of these sizes with any top-k and payload."""
        return size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Prepares the buffers for calls of these sizes, also after an error. Collective.

        Drops operations in flight, revives an aborted group and frees memory of other sizes.
        """
        self._sessions.keep(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        self._sessions.reset(self._sessions.masked())

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[
        torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, Handle, EventOverlap, Hook | None
    ]:
        """Sends tokens to the ranks that own their experts. Collective.

        Args:
            x: [T, H] bfloat16, T <= num_max_dispatch_tokens_per_rank. topk_idx: [T, K] int64, -1 = no expert.
            num_max_dispatch_tokens_per_rank, num_experts: equal on all ranks. R ranks own contiguous blocks
              of experts. If the division leaves a remainder, the first ranks own one more.
            cumulative_local_expert_recv_stats: [E_local] int32, += tokens received.
            dispatch_wait_recv_cost_stats: [R] int64 (or [R, R]: this rank's row), += ns waited for each rank.
            use_fp8: rows travel as e4m3 with a scale per 128 channels. round_scale: scales are powers of two.
              use_ue8m0: scales are packed exponents, four per int32.
            async_finish: return an event to wait on. return_recv_hook: run only the send half. Calling the
              hook fills the returned tensors.
            topk_weights: [T, K] float32. If given, each rank sums its experts' outputs first.
        Returns:
            recv_x: [E_local, R * num_max, H] bfloat16, or (float8_e4m3fn of that shape, scales [E_local,
              R * num_max, H / 128] float32 or [..., H / 512] int32, column-major in the last two).
            recv_count: [E_local] int32, valid rows of each expert.
            handle: (src_info int32 [E_local, R * num_max], layout_range int64 [E_local, R] = begin << 32 |
              count, num_max, H, num_experts). event, hook.
        Raises: InvalidArgument, HookNotCalled, PeerTimeout, GroupAborted.
        """
        completion = self._completion(async_finish, return_recv_hook)
        check_is_tensor("x", x)
        check_is_tensor("topk_idx", topk_idx)
        if topk_weights is not None:
            check_is_tensor("topk_weights", topk_weights)
        if x.dim() != 2 or topk_idx.dim() != 2:
            shapes = (tuple(x.shape), tuple(topk_idx.shape))
            raise InvalidArgument("x, topk_idx", shapes, "[T, H] and [T, K]")
        sizes = Sizes(
            max_tokens=num_max_dispatch_tokens_per_rank,
            hidden=x.shape[1],
            top_k=topk_idx.shape[1],
            num_experts=num_experts,
            payload=payload_of(use_fp8, round_scale, use_ue8m0),
            device=x.device,
        )
        session = self._sessions.get(sizes)
        if cumulative_local_expert_recv_stats is not None:
            name, local = "cumulative_local_expert_recv_stats", len(session.spec.local_experts)
            check_tensor(name, cumulative_local_expert_recv_stats, x.device, torch.int32, E_local=local)
        waited = session.own_row("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats)
        call = DispatchCall(x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, waited)
        operation, outputs, (event, hook) = session.dispatch(call, completion)
        self._operations[outputs.src_info] = operation
        recv_x = outputs.rows if outputs.scales is None else (outputs.rows, outputs.scales)
        handle = (outputs.src_info, outputs.layout_range, sizes.max_tokens, sizes.hidden, num_experts)
        return recv_x, outputs.counts, handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Returns the experts' outputs to the tokens' sources and sums them with their weights. Collective.

        Args:
            x: [E_local, R * num_max, H] bfloat16, row i of an expert belongs to row i of recv_x. Ignored with
              zero_copy, which reads the buffer of get_next_low_latency_combine_buffer(handle).
            topk_idx: [T, K], as at dispatch. On GPUs only its shape is checked.
            topk_weights: [T, K] float32. Ignored if dispatch had them.
            handle: of a dispatch whose hook has run. It may be combined more than once.
            use_logfmt: rows return in a logarithmic format of 10 bits per channel. GPUs only.
            out: [T, H] bfloat16, written in place and returned.
            combine_wait_recv_cost_stats: as at dispatch.
        Returns: combined [T, H] bfloat16; event; hook.
        Raises: InvalidArgument, HookNotCalled, PeerTimeout, GroupAborted.
        """
        completion = self._completion(async_finish, return_recv_hook)
        operation = self._operation(handle)
        session, dispatched = operation.session, (operation.tokens, operation.top_k)
        if operation.received is None:
            raise InvalidArgument("handle", "not received", "of a dispatch whose hook has been called")
        check_is_tensor("topk_idx", topk_idx)
        if topk_weights is not None:
            check_is_tensor("topk_weights", topk_weights)
        if not zero_copy:
            check_is_tensor("x", x)
        if tuple(topk_idx.shape) != dispatched:
            raise InvalidArgument("topk_idx", tuple(topk_idx.shape), f"{dispatched}, as dispatched")
        shape = (operation.tokens, session.spec.hidden)
        if out is None:
            out = torch.empty(shape, dtype=torch.bfloat16, device=session.device)
        check_tensor("out", out, session.device, torch.bfloat16, T=shape[0], H=shape[1])
        call = CombineCall(
            expert_out=session.combine_buffer(operation) if zero_copy else x,
            ids=topk_idx,
            weights=None if operation.weighted else topk_weights,
            out=out,
            wait_stats=session.own_row("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats),
            log_format=use_logfmt,
        )
        return out, *session.combine(operation, call, completion)

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """[E_local, R * num_max, H] bfloat16 for the experts' outputs of a zero_copy combine.

        The memory is fixed. The second next dispatch of the same sizes reuses it.
        """
        operation = self._operation(handle)
        return operation.session.combine_buffer(operation)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, or unmasks it. This rank neither writes to a masked rank nor waits for it.

        Masking is local. Unmasking is collective among all ranks that are then unmasked, including the rank
        itself, and drops operations in flight.
        """
        self._check_mask(rank_to_mask)
        if mask:
            self._sessions.mask(rank_to_mask)
        elif rank_to_mask in (masked := self._sessions.masked()):
            self._sessions.reset(masked - {rank_to_mask})

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fills mask_status [R] int32: 1 for masked ranks, else 0. Waits for the current stream."""
        self._check_mask(None)
        self._sessions.fill_masked(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks all ranks. Collective among all of them; drops operations in flight."""
        self._check_mask(None)
        self._sessions.reset(frozenset())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The Config of a dispatch that is given none: num_sms multiprocessors."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The Config of a combine that is given none: num_sms multiprocessors."""
        return Config(Buffer.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> normal.LayoutResult:
        """Finds out which ranks each token goes to. Local.

        Args: topk_idx [T, K] int64, -1 = no expert; num_experts, a multiple of the number of ranks.
        Returns: num_tokens_per_rank [R] int32; None; num_tokens_per_expert [E] int32; is_token_in_rank [T, R]
          bool; event.
        """
        check_is_tensor("topk_idx", topk_idx)
        streams, order = self._sessions.streams(topk_idx.device), normal.Order(previous_event, async_finish)
        return normal.checked_layout(topk_idx, num_experts, self.group_size, streams, order)

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: normal.NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> normal.DispatchResult:
        """Sends tokens, once each, to the ranks that own their experts. Collective.

        Args: see normal.NormalDispatch; config: only its num_sms counts; previous_event: wait for this event
          instead of the current stream.
        Returns: recv_x like x [N, H], by source rank and token; recv_topk_idx, recv_topk_weights [N, K],
          numbered as this rank's experts, -1 and 0 for others; rows of each local expert, [] with
          num_worst_tokens; handle; event. Of these, counts and handle are None with a handle.
        Raises: InvalidArgument, PeerTimeout, GroupAborted.
        """
        rows = normal.rows_of(x, topk_idx, topk_weights)
        given = (is_token_in_rank, num_tokens_per_expert)
        call = normal.dispatch_call(rows, handle, given, expert_alignment, num_worst_tokens, self.group_size)
        num_sms = normal.sms_of(Buffer.get_dispatch_config(self.group_size) if config is None else config)
        order, session = normal.Order(previous_event, async_finish), self._sessions.normal(rows.x.device)
        return session.dispatch(call, num_sms, order)

    def combine(
        self,
        x: torch.Tensor,
        handle: normal.NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: normal.Bias = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Returns rows to the tokens' sources and sums them, without weights. Collective.

        Sums are float32, in the order bias, then ranks, and rounded once.

        Args: x [N, H] bfloat16, row i belongs to row i of recv_x; handle, of any earlier dispatch;
          topk_weights [N, K] float32, summed too; bias [T, H] bfloat16, or two; the others as with dispatch.
        Returns: combined [T, H] bfloat16; sums of the weights [T, K] float32 or None; event.
        Raises: InvalidArgument, PeerTimeout, GroupAborted.
        """
        check_is_tensor("x", x)
        known = normal.handle_of(handle, x.device, None, self.group_size)
        returned = normal.returned_of(x, topk_weights, bias, known)
        num_sms = normal.sms_of(Buffer.get_combine_config(self.group_size) if config is None else config)
        order, session = normal.Order(previous_event, async_finish), self._sessions.normal(x.device)
        return session.combine(returned, known, num_sms, order)

    def _completion(self, async_finish: bool, return_recv_hook: bool) -> Completion:
        if not self.low_latency_mode:
            raise InvalidArgument("low_latency_mode", False, "True, given to the constructor")
        return Completion.checked(async_finish, return_recv_hook)

    def _check_mask(self, rank: int | None) -> None:
        if not self.enable_shrink:
            raise InvalidArgument("enable_shrink", False, "True, given to the constructor")
        if rank is not None and (not 0 <= rank < self.group_size or rank == self.rank):
            raise InvalidArgument("rank_to_mask", rank, f"0 to {self.group_size - 1}, not this rank itself")

    def _operation(self, handle: Handle) -> Operation:
        src_info = handle[0] if isinstance(handle, tuple | list) and handle else None
        operation = self._operations.get(src_info) if isinstance(src_info, torch.Tensor) else None
        if operation is None:
            raise InvalidArgument("handle", "unknown src_info", "as low_latency_dispatch returned it")
        return operation
