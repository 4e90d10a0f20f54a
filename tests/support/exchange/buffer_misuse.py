"""Programs in DeepEP's form whose calls must be refused: wrong arguments, hooks forgotten or too old."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_server.compat.deep_ep.sessions import NUM_BANKS
from ep_server.errors import HookNotCalled, InvalidArgument
from ep_server.exchange.api import Payload
from tests.support.exchange.buffer_user import HIDDEN, MAX_TOKENS, NUM_EXPERTS, TOP_K, User


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
        ("x = 'list'", lambda: buffer.low_latency_dispatch([1.0], mine.ids, *sizes)),
        ("topk_idx = 'NoneType'", lambda: buffer.low_latency_dispatch(mine.x, None, *sizes)),
        (
            "topk_weights = 'list'",
            lambda: buffer.low_latency_dispatch(mine.x, mine.ids, *sizes, topk_weights=[1.0]),
        ),
        (
            "dispatch_wait_recv_cost_stats = 'list'",
            lambda: buffer.low_latency_dispatch(
                mine.x, mine.ids, *sizes, dispatch_wait_recv_cost_stats=[0] * user.num_ranks
            ),
        ),
        *(
            ("num_experts", partial(buffer.low_latency_dispatch, mine.x, mine.ids, MAX_TOKENS, count))
            for count in (0, -1, 7.5, None, 1 << 34)
        ),
        *(
            ("max_tokens", partial(buffer.low_latency_dispatch, mine.x, mine.ids, most, NUM_EXPERTS))
            for most in (0, -1, 7.5, None, 1 << 40)
        ),
        ("top_k", lambda: buffer.low_latency_dispatch(mine.x, mine.ids.repeat(1, 17), *sizes)),
        (
            f"T = {MAX_TOKENS + 1}",
            lambda: buffer.low_latency_dispatch(
                mine.x.new_zeros(MAX_TOKENS + 1, HIDDEN), mine.ids.new_zeros(MAX_TOKENS + 1, TOP_K), *sizes
            ),
        ),
        ("enable_shrink", lambda: buffer.low_latency_query_mask_buffer(torch.zeros(user.num_ranks).int())),
        ("enable_shrink", lambda: buffer.low_latency_update_mask_buffer(0, True)),
        ("enable_shrink", buffer.low_latency_clean_mask_buffer),
        ("topk_idx, topk_weights", lambda: buffer.dispatch(mine.x, topk_idx=mine.ids)),
        ("handle", lambda: buffer.combine(mine.x, ())),
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
        *(
            ("handle", partial(buffer.low_latency_combine, x, mine.ids, mine.weights, bad))
            for bad in (None, (), (1, 2, 3, 4, 5), handle[0])
        ),
        ("handle", lambda: buffer.get_next_low_latency_combine_buffer(None)),
        ("x = 'NoneType'", lambda: buffer.low_latency_combine(None, mine.ids, mine.weights, handle)),
        ("topk_idx = 'NoneType'", lambda: buffer.low_latency_combine(x, None, mine.weights, handle)),
        ("topk_weights = 'list'", lambda: buffer.low_latency_combine(x, mine.ids, [1.0], handle)),
        ("out = 'list'", lambda: buffer.low_latency_combine(x, mine.ids, mine.weights, handle, out=[])),
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
