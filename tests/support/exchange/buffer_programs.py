"""Programs written against DeepEP's API, run by every rank of a gloo group; each checks its own results.

They run on CPU tensors (test_buffer.py) and on CUDA tensors (test_cuda_buffer.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ep_server.compat.deep_ep.session import NUM_COMBINE_BUFFERS
from ep_server.errors import InvalidArgument
from ep_server.exchange.api import Payload
from tests.support.compare import assert_equal
from tests.support.exchange.buffer_misuse import calls_before_a_clean, forgotten_hooks, misuse
from tests.support.exchange.buffer_user import FLAGS, HIDDEN, MAX_TOKENS, NUM_EXPERTS, User
from tests.support.exchange.conformance import failure_of


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


def handles_do_not_leak(user: User) -> None:
    """What the buffer remembers of a dispatch goes with its handle, also if its hook was called twice."""
    mine, _, _ = user.known("uniform", 0, Payload.BF16)
    for hooked in (False, False, True):
        call = user.buffer.low_latency_dispatch(
            mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, use_fp8=False, return_recv_hook=hooked
        )
    hook = call[4]
    hook()
    with pytest.raises(InvalidArgument, match="received once"):
        hook()
    remembered = user.buffer._operations
    assert len(remembered) == 1
    del call, hook
    gc.collect()
    assert len(remembered) == 0


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
LAST = "destroyed"


def destroyed(user: User) -> None:
    """What is called after destroy() is refused and makes no new memory. Ends the user's buffer."""
    buffer, (mine, _, _) = user.buffer, user.known("uniform", 0, Payload.BF16)
    sizes = (MAX_TOKENS, NUM_EXPERTS)
    _, _, handle, _, hook = buffer.low_latency_dispatch(
        mine.x, mine.ids, *sizes, use_fp8=False, return_recv_hook=True
    )
    hook()
    _, _, _, _, pending = buffer.low_latency_dispatch(
        mine.x, mine.ids, *sizes, use_fp8=False, return_recv_hook=True
    )
    x = buffer.get_next_low_latency_combine_buffer(handle).zero_()
    dist.barrier(user.group)
    buffer.destroy()
    buffer.destroy()
    for name, call in (
        ("exchange", pending),
        ("exchange", lambda: buffer.low_latency_combine(x, mine.ids, mine.weights, handle)),
        ("buffer", lambda: buffer.low_latency_dispatch(mine.x, mine.ids, *sizes, use_fp8=False)),
        ("buffer", lambda: buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)),
    ):
        with pytest.raises(InvalidArgument, match=f"{name} = '(closed|destroyed)'"):
            call()


def run_programs(group: dist.ProcessGroup, device: str) -> dict[str, str]:
    """Runs every program on one buffer of this rank; {name: failure or ""}."""
    user = User(group, device=device)
    programs = PROGRAMS if device == "cuda" else CPU_PROGRAMS
    results = {name: failure_of(lambda p=program: p(user)) for name, program in programs.items()}
    dist.barrier(group)
    results[LAST] = failure_of(lambda: destroyed(user))
    dist.barrier(group)
    user.buffer.destroy()
    return results


def sizes_in_use(group: dist.ProcessGroup) -> None:
    """More sizes than sessions are kept: the oldest is closed, and made again when it is asked for."""
    user = User(group, largest=2 * MAX_TOKENS + 2)
    mine, _, _ = user.known("uniform", 0, Payload.BF16)
    kept = user.buffer._sessions

    def call(max_tokens: int) -> None:
        user.buffer.low_latency_dispatch(mine.x, mine.ids, max_tokens, NUM_EXPERTS, use_fp8=False)

    for max_tokens in [*range(MAX_TOKENS, MAX_TOKENS + 10), MAX_TOKENS]:
        call(max_tokens)
    assert [each.spec.max_tokens for each in kept] == [*range(MAX_TOKENS + 3, MAX_TOKENS + 10), MAX_TOKENS]
    in_a_graph = next(iter(kept))
    in_a_graph.pinned = True
    call(MAX_TOKENS + 10)
    assert [each.spec.max_tokens for each in kept] == [
        MAX_TOKENS + 3,
        *range(MAX_TOKENS + 5, MAX_TOKENS + 10),
        MAX_TOKENS,
        MAX_TOKENS + 10,
    ]
    user.buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)
    assert [each.spec.max_tokens for each in kept] == [MAX_TOKENS, MAX_TOKENS + 3]
    user.pair("uniform", 1, Payload.BF16)
    user.buffer.destroy()
