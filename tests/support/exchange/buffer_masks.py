"""Programs in DeepEP's form that lose ranks: masked on request, silent, or killed. Run by every rank."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import GroupAborted, InvalidArgument, PeerTimeout
from ep_server.exchange.api import Payload
from tests.support.compare import assert_equal
from tests.support.exchange.buffer_misuse import assert_dropped, pending_calls
from tests.support.exchange.buffer_user import HIDDEN, MAX_TOKENS, NUM_EXPERTS, User


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
    user.wait_for_device()  # a rank that is masked first is not written to, and its peer's kernels would wait
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


@dataclass(frozen=True)
class Lost:
    """Which rank is lost at a dispatch, and which at the combine of that dispatch; None = nobody."""

    at_dispatch: int | None = None
    at_combine: int | None = None

    @property
    def ranks(self) -> set[int]:
        return {rank for rank in (self.at_dispatch, self.at_combine) if rank is not None}


LOSSES = {4: [Lost(1, 3)], 2: [Lost(at_dispatch=1), Lost(at_combine=1)]}  # by number of ranks


def shrink(group: dist.ProcessGroup, device: str, killed: bool, losses: Lost) -> None:
    """Ranks are lost at a dispatch and at its combine: the others mask them and go on.

    Args:
        killed: they die, instead of taking no part any more.
    """
    user = User(group, device=device, enable_shrink=True, timeout_seconds=2.0)
    user.pair("uniform", 0, Payload.BF16)
    lost, first = losses.ranks, losses.ranks - {losses.at_combine}
    dist.barrier(group)  # nobody leaves while a peer still wants an answer
    if user.rank == losses.at_dispatch:
        return leave(killed)
    mine, expected, spec = user.known("max_tokens", 1, Payload.BF16, silent=first, gone=lost)
    recv_x, counts, handle, _, _ = user.buffer.low_latency_dispatch(
        mine.x, mine.ids, MAX_TOKENS, NUM_EXPERTS, use_fp8=False
    )
    user.check_dispatch(recv_x, counts, handle, expected, spec)
    assert user.masked() == first
    if user.rank == losses.at_combine:
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
