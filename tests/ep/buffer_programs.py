"""Programs written against DeepEP's API, run by every rank of a gloo group; each checks its own results.

They see the library only as `import deep_ep`. The oracle is paper arithmetic over all ranks' inputs. They run
on CPU tensors (test_buffer.py) and on CUDA tensors (test_cuda_buffer.py).
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_server.compat import deep_ep as ours
from ep_server.ep.arenas import NUM_BANKS
from ep_server.ep.exchange import ExchangeSpec, Payload, Reduction
from ep_server.ep.operation import NUM_COMBINE_BUFFERS
from ep_server.ep.quant import dequantise
from ep_server.errors import GroupAborted, HookNotCalled, InvalidArgument, PeerTimeout
from tests.ep.conformance import failure_of
from tests.harness.compare import assert_equal
from tests.harness.expected import Expected, expect, expert
from tests.harness.routing import Inputs, make_inputs

MAX_TOKENS, HIDDEN, TOP_K, NUM_EXPERTS = 8, 512, 3, 8
MASK = (1 << 32) - 1
FLAGS = {
    Payload.BF16: {"use_fp8": False},
    Payload.FP8: {"use_fp8": True},
    Payload.FP8_POW2: {"use_fp8": True, "round_scale": True},
    Payload.FP8_UE8M0: {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
}


class User:
    """A caller of the library: one buffer, and one way to check what a pair of calls returns.

    Args:
        largest: tokens that the buffer's size hint is for. device: of all tensors, "cpu" or "cuda".
    """

    def __init__(
        self, group: dist.ProcessGroup, largest: int = MAX_TOKENS, device: str = "cpu", **options: Any
    ) -> None:
        ours.install()
        self.deep_ep = importlib.import_module("deep_ep")
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()
        self.on_gpu, self.device = device == "cuda", torch.device("cpu")
        if self.on_gpu:
            self.device = torch.device("cuda", self.rank)
            torch.cuda.set_device(self.device)
        hint = self.deep_ep.Buffer.get_low_latency_rdma_size_hint
        self.buffer = self.deep_ep.Buffer(
            group,
            num_rdma_bytes=hint(largest, HIDDEN, self.num_ranks, NUM_EXPERTS),
            low_latency_mode=True,
            num_qps_per_rank=NUM_EXPERTS // self.num_ranks,
            explicitly_destroy=True,
            **options,
        )

    def known(
        self,
        routing: str,
        seed: int,
        payload: Payload,
        *,
        weights_first: bool = False,
        num_experts: int = NUM_EXPERTS,
        silent: Collection[int] = (),
        gone: Collection[int] = (),
    ) -> tuple[Inputs, Expected, ExchangeSpec]:
        """This rank's inputs, on its device, and what must come of them.

        Args:
            silent: ranks whose tokens do not come. gone: ranks whose experts do not answer.
        """
        share, more = divmod(num_experts, self.num_ranks)
        owners = [rank for rank in range(self.num_ranks) for _ in range(share + (rank < more))]
        reduction = Reduction.RANK if weights_first or self.on_gpu else Reduction.SOURCE
        spec = ExchangeSpec(
            self.rank, self.num_ranks, tuple(owners), MAX_TOKENS, HIDDEN, TOP_K, payload, reduction
        )
        inputs = make_inputs(spec, routing, seed)
        mine = inputs[self.rank]
        answered = torch.tensor([owner not in gone for owner in owners])[mine.ids] & (mine.ids >= 0)
        inputs[self.rank] = replace(mine, ids=torch.where(answered, mine.ids, -1))
        combined = expect(spec, inputs).combined
        for rank in silent:
            inputs[rank] = replace(inputs[rank], ids=torch.full_like(inputs[rank].ids, -1))
        inputs[self.rank] = mine
        expected = replace(expect(spec, inputs), combined=combined)
        return Inputs(*(self.here(t) for t in (mine.x, mine.ids, mine.weights))), expected, spec

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this rank's device."""
        return tensor.to(self.device)

    def masked(self) -> set[int]:
        """What the buffer says."""
        status = self.here(torch.full((self.num_ranks,), 9, dtype=torch.int32))
        self.buffer.low_latency_query_mask_buffer(status)
        assert set(status.tolist()) <= {0, 1}
        return set(status.nonzero().flatten().tolist())

    def experts(self, recv_x: Any, counts: torch.Tensor, spec: ExchangeSpec) -> torch.Tensor:
        """A grouped product with a mask: rows beyond the counts are NaN on both sides."""
        values = dequantise(*recv_x) if isinstance(recv_x, tuple) else recv_x.float()
        out = torch.full(values.shape, torch.nan, dtype=torch.bfloat16, device=self.device)
        for local, (expert_id, count) in enumerate(zip(spec.local_experts, counts.tolist(), strict=True)):
            out[local, :count] = expert(values[local, :count], expert_id, torch.bfloat16)
        return out

    def check_dispatch(
        self, recv_x: Any, counts: torch.Tensor, handle: tuple, expected: Expected, spec: ExchangeSpec
    ) -> None:
        """Shapes, dtypes, strides, devices as documented; rows, counts and both parts of the handle exact."""
        local, capacity = len(spec.local_experts), self.num_ranks * MAX_TOKENS
        src_info, layout_range, max_tokens, hidden, num_experts = handle
        assert (max_tokens, hidden, num_experts) == (MAX_TOKENS, HIDDEN, spec.num_experts)
        assert (src_info.shape, src_info.dtype) == ((local, capacity), torch.int32)
        assert (layout_range.shape, layout_range.dtype) == ((local, self.num_ranks), torch.int64)
        assert (counts.shape, counts.dtype) == ((local,), torch.int32)
        rows, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
        assert rows.shape == (local, capacity, HIDDEN)
        assert rows.dtype == (torch.bfloat16 if scales is None else torch.float8_e4m3fn)
        assert {t.device for t in (rows, counts, src_info, layout_range)} == {self.device}
        if scales is not None:
            packed = spec.payload is Payload.FP8_UE8M0
            assert scales.dtype == (torch.int32 if packed else torch.float32)
            assert scales.shape == (local, capacity, HIDDEN // (512 if packed else 128))
            assert scales.stride()[1] == 1, "the token dimension is the contiguous one"
        kept = counts.tolist()
        found = []
        for e, ranges in enumerate(layout_range.tolist()):
            assert sum(packed & MASK for packed in ranges) == kept[e]
            for source, packed in enumerate(ranges):
                begin, count = packed >> 32, packed & MASK
                found += [(e, source, t) for t in src_info[e, begin : begin + count].tolist()]
        assert found == expected.entries
        places = [(e, i) for e, count in enumerate(kept) for i in range(count)]
        at = tuple(self.here(torch.tensor(places, dtype=torch.int64).view(-1, 2).t()))
        assert_equal(rows[at].cpu(), expected.rows, "recv_x")
        if scales is not None and expected.scales is not None:
            assert_equal(scales[at].cpu(), expected.scales, "scales")

    def pair(self, routing: str, seed: int, payload: Payload, hook: bool = False, **changes: Any) -> None:
        """One dispatch and combine, checked; with hooks, after the returned tensors were found untouched."""
        mine, expected, spec = self.known(routing, seed, payload, **changes)
        stats = self.here(torch.ones(len(spec.local_experts), dtype=torch.int32))
        first = {"topk_weights": mine.weights} if changes.get("weights_first") else {}
        recv_x, counts, handle, event, receive = self.buffer.low_latency_dispatch(
            mine.x,
            mine.ids,
            MAX_TOKENS,
            spec.num_experts,
            cumulative_local_expert_recv_stats=stats,
            async_finish=not hook,
            return_recv_hook=hook,
            **FLAGS[payload],
            **first,
        )
        if hook:
            assert stats.eq(1).all(), "counted before the hook"
            assert event.event is None
            receive()
        else:
            assert receive is None
            event.current_stream_wait()
        self.check_dispatch(recv_x, counts, handle, expected, spec)
        assert_equal(stats, counts + 1, "cumulative stats")
        out = self.here(torch.full_like(expected.combined, torch.nan))
        combined, event, receive = self.buffer.low_latency_combine(
            self.experts(recv_x, counts, spec),
            mine.ids,
            mine.weights,
            handle,
            async_finish=not hook,
            return_recv_hook=hook,
            out=out,
        )
        assert combined is out
        if hook:
            receive()
        else:
            with event:
                pass
        assert_equal(combined.cpu(), expected.combined, f"{routing} {payload} combined")


def every_flag(user: User) -> None:
    """Every payload and routing, with and without hooks, weights at either end."""
    for payload in FLAGS:
        for seed, routing in enumerate(("uniform", "dropped", "max_tokens", "empty_rank", "nobody")):
            user.pair(routing, seed, payload, hook=bool(seed % 2))
            user.pair(routing, seed, payload, hook=not seed % 2, weights_first=True)


def experts_that_do_not_divide(user: User) -> None:
    """7 experts: the first ranks own one more."""
    user.pair("uniform", 1, Payload.BF16, num_experts=7)
    user.pair("zipf", 2, Payload.FP8, num_experts=7, hook=True)


def two_micro_batches(user: User) -> None:
    """Hooks of two batches in flight, called in turn; the receives of the first hide the second's send."""
    for layer in range(3):
        batches = []
        for batch in range(2):
            mine, expected, spec = user.known(("uniform", "zipf")[batch], layer, Payload.FP8)
            call = user.buffer.low_latency_dispatch(
                mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, return_recv_hook=True
            )
            batches.append((mine, expected, spec, call))
        combines = []
        for mine, expected, spec, (recv_x, counts, handle, _, hook) in batches:
            hook()
            user.check_dispatch(recv_x, counts, handle, expected, spec)
            out = user.experts(recv_x, counts, spec)
            combined, _, receive = user.buffer.low_latency_combine(
                out, mine.ids, mine.weights, handle, return_recv_hook=True
            )
            out.fill_(torch.nan)
            combines.append((combined, receive, expected))
        for combined, receive, expected in combines:
            receive()
            assert_equal(combined.cpu(), expected.combined, f"layer {layer}")


def zero_copy_and_again(user: User) -> None:
    """A handle is combined twice; the second time from the library's own buffer, x being unread.

    What was received is freed before.
    """
    mine, expected, spec = user.known("uniform", 5, Payload.BF16)
    recv_x, counts, handle, _, _ = user.buffer.low_latency_dispatch(
        mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, use_fp8=False
    )
    out = user.experts(recv_x, counts, spec)
    combined, _, _ = user.buffer.low_latency_combine(out, mine.ids, mine.weights, handle)
    assert_equal(combined.cpu(), expected.combined, "copied")
    own = user.buffer.get_next_low_latency_combine_buffer(handle)
    assert (own.shape, own.dtype) == (out.shape, torch.bfloat16)
    own[:, :, :] = out
    del recv_x, counts
    poison = torch.full_like(out, torch.nan)
    combined, _, _ = user.buffer.low_latency_combine(poison, mine.ids, mine.weights, handle, zero_copy=True)
    assert_equal(combined.cpu(), expected.combined, "zero copy")


def zero_copy_in_flight(user: User) -> None:
    """The buffers of two dispatches in flight are different memory; an older dispatch has none any more."""
    mine, _, _ = user.known("uniform", 7, Payload.BF16)
    _, _, old, _, _ = user.buffer.low_latency_dispatch(
        mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, use_fp8=False
    )
    handles = []
    for seed in range(2):
        mine, expected, spec = user.known("uniform", seed, Payload.BF16)
        recv_x, counts, handle, _, _ = user.buffer.low_latency_dispatch(
            mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, use_fp8=False
        )
        user.buffer.get_next_low_latency_combine_buffer(handle).copy_(user.experts(recv_x, counts, spec))
        handles.append((mine, expected, handle))
    assert len(handles) == NUM_COMBINE_BUFFERS
    with pytest.raises(InvalidArgument, match="of 2 dispatches ago"):
        user.buffer.get_next_low_latency_combine_buffer(old)
    for mine, expected, handle in handles:
        combined, _, _ = user.buffer.low_latency_combine(
            torch.empty(0), mine.ids, mine.weights, handle, zero_copy=True
        )
        assert_equal(combined.cpu(), expected.combined, "zero copy in flight")


def wait_statistics(user: User) -> None:
    """Waiting is added up per source, as [R] or as this rank's row of [R, R]."""
    mine, _, spec = user.known("uniform", 3, Payload.BF16)
    flat, square = torch.full((user.num_ranks,), 7), torch.zeros(user.num_ranks, user.num_ranks).long()
    for dispatch_stats, combine_stats in ((flat, square), (square, flat)):
        recv_x, counts, handle, _, _ = user.buffer.low_latency_dispatch(
            mine.x,
            mine.ids,
            MAX_TOKENS,
            NUM_EXPERTS,
            dispatch_wait_recv_cost_stats=dispatch_stats,
            use_fp8=False,
        )
        out = user.experts(recv_x, counts, spec)
        user.buffer.low_latency_combine(
            out, mine.ids, mine.weights, handle, combine_wait_recv_cost_stats=combine_stats
        )
    assert (flat >= 7).all()
    assert flat.sum() > 7 * user.num_ranks
    assert square[user.rank].sum() > 0
    others = [row for rank, row in enumerate(square) if rank != user.rank]
    assert not any(row.any() for row in others), "only this rank's row is written"


def forgotten_hooks(user: User) -> None:
    """The bank of a dispatch whose hook was never called comes round; cleaning makes the buffer fit again."""
    mine, _, _ = user.known("uniform", 0, Payload.BF16)

    def send() -> Any:
        return user.buffer.low_latency_dispatch(
            mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, use_fp8=False, return_recv_hook=True
        )

    open_calls = [send() for _ in range(NUM_BANKS)]
    with pytest.raises(HookNotCalled):
        send()
    _, _, handle, _, _ = open_calls[0]
    with pytest.raises(InvalidArgument, match="hook"):
        user.buffer.low_latency_combine(torch.empty(0), mine.ids, mine.weights, handle)
    user.buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)
    user.pair("uniform", 0, Payload.BF16)
    user.pair("uniform", 0, Payload.BF16, hook=True)


def calls_before_a_clean(user: User) -> None:
    """Hooks and handles of before clean_low_latency_buffer are refused; what came after it is not harmed."""
    stale = pending_calls(user)
    user.buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)
    assert_dropped(user, stale)
    for seed in range(NUM_BANKS):
        user.pair("uniform", seed, Payload.BF16)
    assert_dropped(user, stale)
    user.pair("zipf", 1, Payload.BF16, hook=True)


def pending_calls(user: User) -> list[Callable[[], Any]]:
    """The hook of a dispatch, the hook of a combine, and a second combine with its handle."""
    mine, _, spec = user.known("uniform", 0, Payload.BF16)

    def send() -> Any:
        return user.buffer.low_latency_dispatch(
            mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, use_fp8=False, return_recv_hook=True
        )

    recv_x, counts, handle, _, receive = send()
    receive()
    out = user.experts(recv_x, counts, spec)

    def combine() -> Any:
        return user.buffer.low_latency_combine(out, mine.ids, mine.weights, handle, return_recv_hook=True)

    return [send()[4], combine()[2], combine]


def assert_dropped(user: User, calls: list[Callable[[], Any]]) -> None:
    """Everybody's calls fail before anybody goes on."""
    for call in calls:
        with pytest.raises(InvalidArgument, match="reset\\(\\) dropped it"):
            call()
    dist.barrier(user.group)


def handles_do_not_leak(user: User) -> None:
    """What the buffer remembers of a dispatch goes with its handle."""
    mine, _, _ = user.known("uniform", 0, Payload.BF16)
    for _ in range(3):
        call = user.buffer.low_latency_dispatch(mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, use_fp8=False)
    remembered = user.buffer._operations
    del call
    gc.collect()
    assert len(remembered) == 0


def misuse(user: User) -> None:
    """Errors that name the argument; nothing has been sent, so the group works on."""
    buffer, (mine, _, _) = user.buffer, user.known("uniform", 0, Payload.BF16)
    sizes = (MAX_TOKENS, NUM_EXPERTS)
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("use_ue8m0", lambda: buffer.low_latency_dispatch(mine.x, mine.ids, *sizes, use_ue8m0=True)),
        (
            "async_finish",
            lambda: buffer.low_latency_dispatch(
                mine.x, mine.ids, *sizes, async_finish=True, return_recv_hook=True
            ),
        ),
        ("hidden", lambda: buffer.low_latency_dispatch(mine.x[:, :130].contiguous(), mine.ids, *sizes)),
        (
            "hidden",
            lambda: buffer.low_latency_dispatch(
                mine.x[:, :128].contiguous(), mine.ids, *sizes, round_scale=True, use_ue8m0=True
            ),
        ),
        ("x", lambda: buffer.low_latency_dispatch(mine.x.float(), mine.ids, *sizes)),
        ("topk_idx|topk_ids", lambda: buffer.low_latency_dispatch(mine.x, mine.ids.int(), *sizes)),
        ("on meta", lambda: buffer.low_latency_dispatch(mine.x.to("meta"), mine.ids, *sizes)),
        ("x, topk_idx", lambda: buffer.low_latency_dispatch(mine.x[0], mine.ids, *sizes)),
        ("num_rdma_bytes", lambda: buffer.low_latency_dispatch(mine.x, mine.ids, 10_000, NUM_EXPERTS)),
        (
            "cumulative_local_expert_recv_stats",
            lambda: buffer.low_latency_dispatch(
                mine.x, mine.ids, *sizes, cumulative_local_expert_recv_stats=torch.zeros(99).int()
            ),
        ),
        (
            "dispatch_wait_recv_cost_stats",
            lambda: buffer.low_latency_dispatch(
                mine.x, mine.ids, *sizes, dispatch_wait_recv_cost_stats=torch.zeros(99).long()
            ),
        ),
        ("enable_shrink", lambda: buffer.low_latency_query_mask_buffer(torch.zeros(user.num_ranks).int())),
        ("enable_shrink", lambda: buffer.low_latency_update_mask_buffer(0, True)),
        ("enable_shrink", buffer.low_latency_clean_mask_buffer),
        ("get_dispatch_layout", lambda: buffer.get_dispatch_layout(mine.ids, NUM_EXPERTS)),
        ("low_latency_dispatch", lambda: buffer.dispatch(mine.x, topk_idx=mine.ids)),
        ("low_latency_combine", lambda: buffer.combine(mine.x, ())),
    ]
    if not user.on_gpu:  # a kernel's findings are raised by the next call
        wrong.append(
            ("topk_ids", lambda: buffer.low_latency_dispatch(mine.x, mine.ids + NUM_EXPERTS, *sizes))
        )
    for name, call in wrong:
        with pytest.raises(InvalidArgument, match=name):
            call()
    _, _, handle, event, _ = buffer.low_latency_dispatch(mine.x, mine.ids, *sizes, use_fp8=False)
    with pytest.raises(InvalidArgument, match="event"):
        event.current_stream_wait()
    x = user.here(torch.zeros(len(handle[0]), user.num_ranks * MAX_TOKENS, HIDDEN, dtype=torch.bfloat16))
    wrong = [
        ("handle", lambda: buffer.low_latency_combine(x, mine.ids, mine.weights, (x, *handle[1:]))),
        ("topk_idx", lambda: buffer.low_latency_combine(x, mine.ids[:0], mine.weights, handle)),
        ("topk_weights", lambda: buffer.low_latency_combine(x, mine.ids, None, handle)),
        ("topk_weights", lambda: buffer.low_latency_combine(x, mine.ids, mine.weights.double(), handle)),
        ("expert_out", lambda: buffer.low_latency_combine(x[:, :1], mine.ids, mine.weights, handle)),
        ("out", lambda: buffer.low_latency_combine(x, mine.ids, mine.weights, handle, out=x)),
    ]
    if not user.on_gpu:
        wrong.append(
            ("use_logfmt", lambda: buffer.low_latency_combine(x, mine.ids, mine.weights, handle, True))
        )
    for name, call in wrong:
        with pytest.raises(InvalidArgument, match=name):
            call()
    user.pair("uniform", 8, Payload.BF16)


PROGRAMS: dict[str, Callable[[User], None]] = {
    function.__name__: function
    for function in (
        every_flag,
        experts_that_do_not_divide,
        two_micro_batches,
        zero_copy_and_again,
        zero_copy_in_flight,
        forgotten_hooks,
        calls_before_a_clean,
        handles_do_not_leak,
        misuse,
    )
}
CPU_PROGRAMS = PROGRAMS | {"wait_statistics": wait_statistics}


def run_programs(group: dist.ProcessGroup, device: str) -> dict[str, str]:
    """Runs every program on one buffer of this rank; {name: failure or ""}."""
    user = User(group, device=device)
    programs = PROGRAMS if device == "cuda" else CPU_PROGRAMS
    results = {name: failure_of(lambda p=program: p(user)) for name, program in programs.items()}
    dist.barrier(group)
    user.buffer.destroy()
    return results


def masks(group: dist.ProcessGroup, device: str) -> None:
    """The last rank is masked by the others on request, then unmasked by all."""
    user = User(group, device=device, enable_shrink=True, timeout_seconds=20)
    user.pair("uniform", 0, Payload.BF16)
    dist.barrier(group)
    last = user.num_ranks - 1
    assert user.masked() == set()
    if user.rank != last:
        user.buffer.low_latency_update_mask_buffer(last, True)
        assert user.masked() == {last}
        user.pair("uniform", 4, Payload.BF16, silent={last}, gone={last})
        with pytest.raises(InvalidArgument, match="masked"):
            user.pair("uniform", 1, Payload.FP8)  # would need new memory
    dist.barrier(group)
    stale = [] if user.rank == last else pending_calls(user)
    user.buffer.low_latency_clean_mask_buffer()
    assert_dropped(user, stale)
    assert user.masked() == set()
    user.pair("zipf", 2, Payload.BF16)
    stale = pending_calls(user)
    dist.barrier(group)
    if user.rank != last:
        user.buffer.low_latency_update_mask_buffer(last, True)
        user.buffer.low_latency_update_mask_buffer(last, False)
    else:
        user.buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)
    assert_dropped(user, stale)
    user.pair("zipf", 3, Payload.BF16, hook=True)
    for bad in (-1, user.rank, user.num_ranks):
        with pytest.raises(InvalidArgument, match="rank_to_mask"):
            user.buffer.low_latency_update_mask_buffer(bad, True)
    user.buffer.destroy()


def masks_of_all_sizes(group: dist.ProcessGroup, device: str) -> None:
    """A rank that is masked holds for every payload, those used before and whichever is used next."""
    user = User(group, device=device, enable_shrink=True, timeout_seconds=20)
    for payload in (Payload.BF16, Payload.FP8):
        user.pair("uniform", 0, payload)
    dist.barrier(group)
    last = user.num_ranks - 1
    if user.rank != last:
        user.buffer.low_latency_update_mask_buffer(last, True)
        for payload in (Payload.FP8, Payload.BF16):
            user.pair("zipf", 1, payload, hook=True, silent={last}, gone={last})
    dist.barrier(group)
    user.buffer.low_latency_clean_mask_buffer()
    for payload in (Payload.BF16, Payload.FP8):
        user.pair("uniform", 2, payload)
    user.buffer.destroy()


def a_rank_that_stays_away(group: dist.ProcessGroup, device: str, shrink: bool) -> None:
    """The last rank makes no call: with shrink the others mask it after the deadline, without they raise."""
    user = User(group, device=device, enable_shrink=shrink, timeout_seconds=2.0)
    user.pair("nobody", 0, Payload.BF16)
    last = user.num_ranks - 1
    if user.rank != last:
        if shrink:
            for seed in range(2):
                user.pair("uniform", seed, Payload.BF16, silent={last}, gone={last})
            assert user.masked() == {last}
        else:
            with pytest.raises((PeerTimeout, GroupAborted)):
                calls_until_one_raises(user)
    dist.barrier(group)
    if shrink:
        user.buffer.low_latency_clean_mask_buffer()
    else:
        user.buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)
    user.pair("nobody", 2, Payload.BF16)
    user.buffer.destroy()


def calls_until_one_raises(user: User) -> None:
    """A dispatch, and on a GPU the next one, which finds what the kernel of the first has met."""
    mine, _, _ = user.known("uniform", 1, Payload.BF16)
    for _ in range(2):
        user.buffer.low_latency_dispatch(mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, use_fp8=False)
        if user.on_gpu:
            torch.cuda.synchronize()


LOST_AT_DISPATCH, LOST_AT_COMBINE = 1, 3


def shrink(group: dist.ProcessGroup, device: str, killed: bool) -> None:
    """Rank 1 is lost at a dispatch and rank 3 at its combine: the other two mask them and go on.

    Args:
        killed: they die, instead of taking no part any more.
    """
    user = User(group, device=device, enable_shrink=True, timeout_seconds=1.0)
    user.pair("uniform", 0, Payload.BF16)
    lost = {LOST_AT_DISPATCH, LOST_AT_COMBINE}
    dist.barrier(group)  # nobody leaves while a peer still wants an answer
    if user.rank == LOST_AT_DISPATCH:
        return leave(killed)
    mine, expected, spec = user.known("max_tokens", 1, Payload.BF16, silent={LOST_AT_DISPATCH}, gone=lost)
    recv_x, counts, handle, _, _ = user.buffer.low_latency_dispatch(
        mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, use_fp8=False
    )
    user.check_dispatch(recv_x, counts, handle, expected, spec)
    assert user.masked() == {LOST_AT_DISPATCH}
    if user.rank == LOST_AT_COMBINE:
        return leave(killed)
    combined, _, _ = user.buffer.low_latency_combine(
        user.experts(recv_x, counts, spec), mine.ids, mine.weights, handle
    )
    assert_equal(combined.cpu(), expected.combined, "combined by the survivors")
    assert user.masked() == lost
    for seed, hook in enumerate((False, True)):
        user.pair("zipf", seed, Payload.BF16, hook=hook, silent=lost, gone=lost)
    user.buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)
    assert user.masked() == lost
    user.pair("uniform", 2, Payload.BF16, silent=lost, gone=lost)
    user.buffer.destroy()
    return None


def leave(killed: bool) -> None:
    """Ends this rank, or its part in the exchange."""
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)


def sizes_in_use(group: dist.ProcessGroup) -> None:
    """More sizes than arenas are kept: the oldest is closed, and made again when it is asked for."""
    user = User(group, largest=2 * MAX_TOKENS + 2)
    mine, _, _ = user.known("uniform", 0, Payload.BF16)
    kept = user.buffer._arenas

    def call(max_tokens: int) -> None:
        user.buffer.low_latency_dispatch(mine.x, mine.ids, max_tokens, NUM_EXPERTS, use_fp8=False)

    for max_tokens in [*range(MAX_TOKENS, MAX_TOKENS + 10), MAX_TOKENS]:
        call(max_tokens)
    assert [arena.spec.max_tokens for arena in kept] == [*range(MAX_TOKENS + 3, MAX_TOKENS + 10), MAX_TOKENS]
    in_a_graph = next(iter(kept))
    in_a_graph.pinned = True
    call(MAX_TOKENS + 10)
    assert [arena.spec.max_tokens for arena in kept] == [
        MAX_TOKENS + 3,
        *range(MAX_TOKENS + 5, MAX_TOKENS + 10),
        MAX_TOKENS,
        MAX_TOKENS + 10,
    ]
    user.buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)
    assert [arena.spec.max_tokens for arena in kept] == [MAX_TOKENS, MAX_TOKENS + 3]
    user.pair("uniform", 1, Payload.BF16)
    user.buffer.destroy()
