"""Programs in DeepEP's form that only CUDA tensors can run: streams, events, graphs, the log format, NCCL.

Run by every rank of a gloo group; programs for any device are in buffer_programs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import Payload
from ep_server.exchange.quant import dequantise
from tests.support.compare import assert_equal
from tests.support.exchange.buffer_user import FLAGS, HIDDEN, MAX_TOKENS, NUM_EXPERTS, TOP_K, User
from tests.support.exchange.routing import Inputs
from tests.support.gpus import gpu_of

CYCLES = 20_000_000  # of a GPU's clock, about 10 ms: longer than every call that must wait for it


def on_gpu(group: dist.ProcessGroup, **options: Any) -> User:
    return User(group, device="cuda", **options)


def done(user: User) -> None:
    """Nobody frees memory that a peer still writes to."""
    torch.cuda.synchronize()
    dist.barrier(user.group)
    user.buffer.destroy()


def dispatch(user: User, mine: Inputs, payload: Payload, **options: Any) -> Any:
    return user.buffer.low_latency_dispatch(
        mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, **FLAGS[payload], **options
    )


def streams(group: dist.ProcessGroup) -> None:
    """Calls without a hook see what the current stream does before them, and it sees what they did."""
    user = on_gpu(group)
    assert isinstance(user.buffer.get_comm_stream(), torch.cuda.Stream)
    assert user.buffer.get_comm_stream() == user.buffer.get_comm_stream() != torch.cuda.current_stream()
    for seed, asynchronous in enumerate((False, True)):
        mine, expected, spec = user.known("max_tokens", seed, Payload.FP8)
        late = torch.full_like(mine.x, torch.nan)
        torch.cuda._sleep(CYCLES)
        late.copy_(mine.x)
        given = Inputs(late, mine.ids, mine.weights)
        recv_x, counts, handle, event, _ = dispatch(user, given, Payload.FP8, async_finish=asynchronous)
        assert (event.event is not None) == asynchronous
        with event:
            pass
        user.check_dispatch(recv_x, counts, handle, expected, spec)
        answers, late = (
            user.experts(recv_x, counts, spec),
            torch.full_like(recv_x[0], 0, dtype=torch.bfloat16),
        )
        torch.cuda._sleep(CYCLES)
        late.copy_(answers)
        combined, event, _ = user.buffer.low_latency_combine(
            late, mine.ids, mine.weights, handle, async_finish=asynchronous
        )
        with event:
            pass
        assert_equal(combined.cpu(), expected.combined, f"combined, asynchronous={asynchronous}")
    captured = user.buffer.capture()
    captured.current_stream_wait()
    done(user)


def freed_early(group: dist.ProcessGroup) -> None:
    """What an asynchronous call reads may be freed at once: the allocator does not give it away before."""
    user = on_gpu(group)
    mine, expected, spec = user.known("max_tokens", 3, Payload.BF16)
    for _ in range(4):
        x, ids = mine.x.clone(), mine.ids.clone()
        with torch.cuda.stream(user.buffer.get_comm_stream()):
            torch.cuda._sleep(CYCLES)  # the call comes to its turn late
        *_, handle, event, _ = called = dispatch(
            user, Inputs(x, ids, mine.weights), Payload.BF16, async_finish=True
        )
        waits, event.extra_tensors = event.event, None
        del x, ids, event
        junk = [torch.full_like(mine.x, torch.nan), torch.full_like(mine.ids, -1)]
        waits.current_stream_wait()
        user.check_dispatch(called[0], called[1], handle, expected, spec)
        del junk
    done(user)


def order_of_sends(group: dist.ProcessGroup) -> None:
    """A call with a hook after an asynchronous one that nobody waited for comes after it all the same."""
    user = on_gpu(group)
    for seed in range(4):
        first, first_expected, spec = user.known("uniform", seed, Payload.BF16)
        second, second_expected, _ = user.known("zipf", seed, Payload.BF16)
        early = dispatch(user, first, Payload.BF16, async_finish=True)
        late = dispatch(user, second, Payload.BF16, return_recv_hook=True)
        late[4]()
        early[3].current_stream_wait()
        user.check_dispatch(*early[:3], first_expected, spec)
        user.check_dispatch(*late[:3], second_expected, spec)
    done(user)


def hooks_keep_their_stream(group: dist.ProcessGroup) -> None:
    """A hook works on the stream that was current at its call, wherever it is called."""
    user, side = on_gpu(group), torch.cuda.Stream()
    mine, expected, spec = user.known("uniform", 1, Payload.FP8)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        recv_x, counts, handle, _, receive = dispatch(user, mine, Payload.FP8, return_recv_hook=True)
    receive()
    torch.cuda.current_stream().wait_stream(side)
    user.check_dispatch(recv_x, counts, handle, expected, spec)
    with torch.cuda.stream(side):
        answers = user.experts(recv_x, counts, spec)
        combined, _, receive = user.buffer.low_latency_combine(
            answers, mine.ids, mine.weights, handle, return_recv_hook=True
        )
        with pytest.raises(InvalidArgument, match="hook was not called"):
            user.buffer.low_latency_combine(answers, mine.ids, mine.weights, handle)
    receive()
    torch.cuda.current_stream().wait_stream(side)
    assert_equal(combined.cpu(), expected.combined, "combined")
    done(user)


def wait_statistics(group: dist.ProcessGroup) -> None:
    """Waiting for a rank that comes late is added to its place, on the device."""
    user = on_gpu(group)
    mine, _, spec = user.known("uniform", 3, Payload.BF16)
    flat = user.here(torch.full((user.num_ranks,), 7))
    square = user.here(torch.zeros(user.num_ranks, user.num_ranks, dtype=torch.int64))
    user.pair("uniform", 2, Payload.BF16)
    for dispatch_stats, combine_stats in ((flat, square), (square, flat)):
        torch.cuda.synchronize()
        dist.barrier(group)
        if user.rank == 0:
            torch.cuda._sleep(10 * CYCLES)
        recv_x, counts, handle, _, _ = dispatch(
            user, mine, Payload.BF16, dispatch_wait_recv_cost_stats=dispatch_stats
        )
        answers = user.experts(recv_x, counts, spec)
        torch.cuda.synchronize()
        dist.barrier(group)
        if user.rank == 0:
            torch.cuda._sleep(10 * CYCLES)
        user.buffer.low_latency_combine(
            answers, mine.ids, mine.weights, handle, combine_wait_recv_cost_stats=combine_stats
        )
    assert (flat >= 7).all()
    own, others = square[user.rank], [row for rank, row in enumerate(square) if rank != user.rank]
    assert not any(bool(row.any()) for row in others), "only this rank's row is written"
    if user.rank != 0:
        for name, waited, before in (("[R]", flat, 7), ("[R, R]", own, 0)):
            assert int(waited[0]) > before, f"{name}: rank 0 was late, {waited.tolist()} ns waited"
    done(user)


def few_multiprocessors(group: dist.ProcessGroup) -> None:
    """A bound on what a call may fill changes no result."""
    user = on_gpu(group, low_latency_num_sms=4)
    for seed, payload in enumerate(FLAGS):
        user.pair("max_tokens", seed, payload, hook=bool(seed % 2))
    done(user)


def log_format(group: dist.ProcessGroup) -> None:
    """Rows that return in 10 bits a channel: near the exact sum, no NaN, zeros for tokens without experts."""
    user = on_gpu(group)
    for seed, routing in enumerate(("max_tokens", "dropped", "nobody", "zipf")):
        mine, expected, spec = user.known(routing, seed, Payload.BF16)
        recv_x, counts, handle, _, _ = dispatch(user, mine, Payload.BF16)
        answers = user.experts(recv_x, counts, spec)
        combined, _, receive = user.buffer.low_latency_combine(
            answers, mine.ids, mine.weights, handle, use_logfmt=True, return_recv_hook=True
        )
        receive()
        found, wanted = combined.cpu().double(), expected.combined.double()
        assert not found.isnan().any(), f"{routing}: NaN"
        idle = (mine.ids < 0).all(dim=1).cpu()
        assert not found[idle].any(), f"{routing}: a token without experts is not zero"
        if wanted.any():
            apart = float((found - wanted).norm() / wanted.norm())
            assert 0 < apart < 0.03, f"{routing}: relative error {apart} of a 10-bit format"
    done(user)


class Captured:
    """A graph of dispatches and combines whose tensors are filled anew before each replay.

    Args:
        hook: with hooks; else without, and then every second call is asynchronous.
    """

    OPERATIONS = 3

    def __init__(self, user: User, payload: Payload, *, hook: bool, zero_copy: bool) -> None:
        self.user, self.payload, self.hook, self.zero_copy = user, payload, hook, zero_copy
        _, _, spec = user.known("uniform", 0, payload)
        self.x = user.here(torch.zeros(MAX_TOKENS, HIDDEN, dtype=torch.bfloat16))
        self.ids = user.here(torch.full((MAX_TOKENS, TOP_K), -1))
        self.weights = user.here(torch.zeros(MAX_TOKENS, TOP_K))
        self.stats = user.here(torch.zeros(len(spec.local_experts), dtype=torch.int32))
        factors = [(1.0 + e / 16) * (-1 if e % 2 else 1) for e in spec.local_experts]
        self.factors = user.here(torch.tensor(factors)).view(-1, 1, 1)
        user.pair("uniform", 0, payload)  # memory is taken before
        torch.cuda.synchronize()
        dist.barrier(user.group)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [self.operation(bool(turn % 2)) for turn in range(self.OPERATIONS)]

    def operation(self, asynchronous: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts and combined, without a wait of the host."""
        how = {"return_recv_hook": self.hook, "async_finish": asynchronous and not self.hook}
        given = Inputs(self.x, self.ids, self.weights)
        recv_x, counts, handle, event, receive = dispatch(
            self.user, given, self.payload, cumulative_local_expert_recv_stats=self.stats, **how
        )
        self.end(event, receive)
        values = dequantise(*recv_x) if isinstance(recv_x, tuple) else recv_x.float()
        answers = (values * self.factors).to(torch.bfloat16)
        if self.zero_copy:
            self.user.buffer.get_next_low_latency_combine_buffer(handle).copy_(answers)
            answers = torch.full_like(answers, torch.nan)
        combined, event, receive = self.user.buffer.low_latency_combine(
            answers, self.ids, self.weights, handle, zero_copy=self.zero_copy, **how
        )
        self.end(event, receive)
        return counts, combined

    def end(self, event: Any, receive: Any) -> None:
        receive() if self.hook else event.__exit__(None, None, None)

    def replay(self, mine: Inputs) -> None:
        """With poisoned results; tokens that this replay does not have choose no expert."""
        count = len(mine.x)
        for tensor in (self.x, self.weights, *(combined for _, combined in self.results)):
            tensor.fill_(torch.nan)
        self.ids.fill_(-1)
        self.x[:count], self.ids[:count], self.weights[:count] = mine.x, mine.ids, mine.weights
        self.graph.replay()


def graphs(group: dist.ProcessGroup, hook: bool) -> None:
    """An odd number of operations, captured once and replayed with other tokens and routings."""
    user = on_gpu(group)
    for payload, zero_copy in ((Payload.FP8, False), (Payload.BF16, True)):
        captured = Captured(user, payload, hook=hook, zero_copy=zero_copy)
        counted = captured.stats.clone()
        for seed, routing in enumerate(
            ("uniform", "zipf", "dropped", "nobody", "all_to_one", "max_tokens") * 3
        ):
            mine, expected, _ = user.known(routing, seed, payload)
            captured.replay(mine)
            found = [(counts.tolist(), combined.cpu()) for counts, combined in captured.results]
            for turn, (counts, combined) in enumerate(found):
                what = f"{payload} replay {seed} ({routing}) operation {turn}"
                assert sum(counts) == len(expected.entries), what
                assert_equal(combined[: len(mine.x)], expected.combined, what)
                assert not combined[len(mine.x) :].any(), f"{what}: rows beyond its tokens"
            counted += sum(counts for counts, _ in captured.results)
        assert_equal(captured.stats.cpu(), counted.to(torch.int32).cpu(), "statistics over all replays")
        user.pair("uniform", 9, payload)  # calls outside of the graph go on
    done(user)


def graphs_need_memory_first(group: dist.ProcessGroup) -> None:
    """The first call of its sizes cannot be inside a graph: its memory is taken by all ranks together."""
    user = on_gpu(group)
    mine, _, _ = user.known("max_tokens", 0, Payload.BF16)
    user.pair("uniform", 0, Payload.FP8)
    with pytest.raises(InvalidArgument, match="outside of a graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        mine.x.add_(0)  # a graph is not empty
        dispatch(user, mine, Payload.BF16)
    user.pair("uniform", 1, Payload.BF16)
    done(user)


def wrong_ids(group: dist.ProcessGroup) -> None:
    """Ids out of range are found by the kernel and raised by the next call; a clean makes all fit again."""
    user = on_gpu(group, timeout_seconds=2.0)
    mine, _, _ = user.known("max_tokens", 0, Payload.BF16)
    user.pair("uniform", 0, Payload.BF16)
    dist.barrier(group)
    if user.rank == 0:
        dispatch(user, Inputs(mine.x, mine.ids + NUM_EXPERTS, mine.weights), Payload.BF16)
        torch.cuda.synchronize()
        with pytest.raises(InvalidArgument, match="topk_ids"):
            dispatch(user, mine, Payload.BF16)
    dist.barrier(group)
    user.buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)
    user.pair("uniform", 1, Payload.BF16)
    done(user)


def over_nccl(group: dist.ProcessGroup) -> None:
    """The group may be one of NCCL; tensors may be made on the GPU by default, as DeepEP's own test does."""
    torch.cuda.set_device(gpu_of(group.rank()))
    nccl = dist.new_group(backend="nccl")
    user = User(nccl, device="cuda")
    mine, expected, spec = user.known("uniform", 1, Payload.FP8)
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    try:
        recv_x, counts, handle, _, _ = dispatch(user, mine, Payload.FP8)
        user.buffer.low_latency_combine(torch.zeros(recv_x[0].shape), mine.ids, mine.weights, handle)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device("cpu")
    user.check_dispatch(recv_x, counts, handle, expected, spec)
    user.pair("zipf", 2, Payload.FP8, hook=True)
    done(user)
    dist.destroy_process_group(nccl)


def profiled(group: dist.ProcessGroup) -> None:
    """A profiler finds one kernel name for dispatch and one for combine, with and without hooks.

    DeepEP's benchmark reads kernel times this way: one line of the profiler's table has "dispatch", one has
    "combine", and with a hook the trace has as many send halves as receive halves, in turn.
    """
    user = on_gpu(group)
    mine, _, _ = user.known("max_tokens", 1, Payload.FP8)
    calls = 5
    for hook in (False, True):
        for payload in (Payload.FP8, Payload.BF16):

            def pair(payload: Payload = payload, hook: bool = hook) -> None:
                recv_x, _, handle, _, receive = dispatch(user, mine, payload, return_recv_hook=hook)
                if receive is not None:
                    receive()
                outputs = torch.zeros(recv_shape(recv_x), dtype=torch.bfloat16, device=mine.x.device)
                _, _, receive = user.buffer.low_latency_combine(
                    outputs, mine.ids, mine.weights, handle, return_recv_hook=hook
                )
                if receive is not None:
                    receive()

            pair()
            torch.cuda.synchronize()
            dist.barrier(group)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(calls):
                    pair()
                torch.cuda.synchronize()
            table = profile.key_averages().table(sort_by="cuda_time_total", max_name_column_width=100)
            for name in ("dispatch", "combine"):
                lines = [line for line in table.splitlines() if name in line]
                assert len(lines) == 1, f"hook={hook}, {name}:\n{table}"
                kernels = [event for event in profile.events() if f"::{name}" in event.name]
                assert len(kernels) == calls * (2 if hook else 1), f"hook={hook}, {name}: {len(kernels)}"
    done(user)


def recv_shape(recv_x: Any) -> torch.Size:
    rows = recv_x[0] if isinstance(recv_x, tuple) else recv_x
    return torch.Size(rows.shape)
