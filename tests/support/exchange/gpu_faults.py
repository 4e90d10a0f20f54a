"""What ranks on GPUs run in tests where something goes wrong: ranks absent, masked, late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import ExchangeError, GroupAborted, HookNotCalled, InvalidArgument, PeerTimeout
from ep_server.exchange import device_wait
from ep_server.exchange.api import ExchangeSpec, Payload, Received, View
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from tests.support.compare import assert_equal
from tests.support.exchange.conformance import run_pair
from tests.support.exchange.gpu_group import (
    a_models_spec,
    close_exchange,
    on_gpu,
    open_exchange,
    run_experts,
    run_fused,
    sums_without,
)
from tests.support.exchange.on_gpu import OnGpu
from tests.support.exchange.routing import make_inputs

SECOND = 1_000_000_000
OPERATIONS = 20  # of a round


def small(group: dist.ProcessGroup, timeout_ns: int) -> ExchangeSpec:
    return replace(a_models_spec(group.rank(), group.size(), Payload.BF16, tokens=4), timeout_ns=timeout_ns)


def failures(group: dist.ProcessGroup) -> None:
    """A rank that does not come is named, ids out of range are refused; the group goes on after a reset."""
    exchange = open_exchange(group, small(group, SECOND))
    spec = exchange.spec
    mine, last = make_inputs(spec, "max_tokens", 1)[spec.rank], spec.num_ranks - 1
    given = on_gpu(mine)
    if spec.rank != last:
        counts = torch.full((len(spec.local_experts),), 77, dtype=torch.int32, device=given[0].device)
        received = None
        with pytest.raises((PeerTimeout, GroupAborted)) as caught:
            received = exchange.dispatch(*given, counts=counts)
            exchange.synchronize()
        # What is behind it in the stream has nothing to do, instead of anything.
        assert received is None or not (counts.any() or received.offsets.any())
        if isinstance(caught.value, PeerTimeout):
            assert (caught.value.phase, caught.value.peer) == ("recv_header", last)
    exchange.barrier()
    exchange.reset()
    received = exchange.dispatch(*given)
    exchange.combine(torch.zeros_like(received.rows), received)
    exchange.synchronize()

    # Ids out of range are refused by the kernel and end the operation of all.
    if spec.rank == 0:
        bad = given[1].clone()
        bad[1, 2] = spec.num_experts
        with pytest.raises(InvalidArgument, match="topk_ids"):
            exchange.dispatch(given[0], bad, given[2])
            exchange.synchronize()
    exchange.barrier()
    exchange.reset()
    close_exchange(exchange)


def hook_not_called(group: dist.ProcessGroup) -> None:
    """A bank that comes round unread: at once where the host knows, by the kernel inside a graph."""
    exchange = open_exchange(group, small(group, SECOND))
    spec = exchange.spec
    given = on_gpu(make_inputs(spec, "max_tokens", 1)[spec.rank])
    for _ in range(spec.num_banks):
        exchange.dispatch_send(*given)
    with pytest.raises(HookNotCalled):
        exchange.dispatch_send(*given)
    exchange.synchronize()
    exchange.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(spec.num_banks + 1):
            exchange.dispatch_send(*given)
    with pytest.raises((HookNotCalled, GroupAborted)):
        graph.replay()
        exchange.synchronize()
    exchange.barrier()
    exchange.reset()
    run_pair(OnGpu(exchange), "zipf", 2, View.PADDED)
    close_exchange(exchange)


def closed_beside_work(group: dist.ProcessGroup) -> None:
    """close() returns though the GPU goes on, which uses the memory until it has ended its work."""
    exchange = open_exchange(group, small(group, SECOND // 10))
    exchange.synchronize()
    exchange.barrier()
    device_wait.IDLE_SECONDS = 0.1
    torch.cuda._sleep(5_000_000_000)  # more than a second on every GPU
    slept = torch.cuda.current_stream().record_event()
    exchange.close()
    assert not slept.query()
    torch.cuda.synchronize()


def stale_handles(group: dist.ProcessGroup) -> None:
    """What another exchange received, or this one before a reset, is refused before anything is enqueued."""
    spec = replace(small(group, 20 * SECOND), num_banks=4)
    one, two = (open_exchange(group, spec) for _ in range(2))
    given = on_gpu(make_inputs(spec, "max_tokens", 1)[spec.rank])
    received, in_place = one.dispatch(*given), one.dispatch(*given, View.INDEX)
    answers = run_experts(spec, received)
    returning = one.combine_send(answers, one.dispatch(*given))
    pending = one.dispatch_send(*given)

    def refused(*calls: Callable[[], object]) -> None:
        for call in calls:
            with pytest.raises(InvalidArgument, match="of another exchange, or of before a reset"):
                call()

    def of(exchange: NvlinkExchange) -> tuple[Callable[[], object], ...]:
        return (
            lambda: exchange.combine(answers, received),
            lambda: exchange.combine_send(answers, received),
            lambda: exchange.release(in_place),
        )

    refused(*of(two))
    one.synchronize()
    one.barrier()
    one.reset()
    refused(*of(one), lambda: pending.recv(View.PADDED), returning.recv)
    for exchange in (one, two):
        run_pair(OnGpu(exchange), "zipf", 2, View.PADDED)
        close_exchange(exchange)


def masking(group: dist.ProcessGroup, by_hand: bool) -> None:
    """The last rank stops taking part: the others mask it, by deadline or by hand, and get their own sums."""
    timeout_ns = 60 * SECOND if by_hand else SECOND
    exchange = open_exchange(group, small(group, timeout_ns), on_timeout="raise" if by_hand else "mask")
    spec = exchange.spec
    inputs, last = make_inputs(spec, "max_tokens", 1), spec.num_ranks - 1
    mine = inputs[spec.rank]
    if by_hand:  # a kernel's first launch may wait for the device, so for the kernel that waits for the mask
        run_fused(exchange, mine)
        torch.zeros_like(exchange.empty_padded()[0])
        exchange.synchronize()
        exchange.barrier()
    if spec.rank != last:
        wanted = sums_without(spec, inputs, last)
        if by_hand:
            threading.Timer(0.2, exchange.mask, ([last],)).start()  # in the kernel that waits for it
            received = exchange.dispatch(*on_gpu(mine))
            exchange.combine(torch.zeros_like(received.rows), received)
        for turn in range(5):
            began = time.monotonic()
            assert_equal(run_fused(exchange, mine), wanted, f"turn {turn}")
            assert turn == 0 or time.monotonic() - began < 5.0
        assert exchange.masked == {last}
    exchange.barrier()
    exchange.reset()
    assert exchange.masked == frozenset()
    run_pair(OnGpu(exchange), "max_tokens", 2, View.PADDED)
    close_exchange(exchange)


def masked_in_the_middle(group: dist.ProcessGroup, rounds: int = 30, within: float = 1e-3) -> None:
    """Rank 0 and the last one mask each other while both work: all rows of an operation have places, or none.

    What the last rank got from itself lies behind the rows of rank 0, so it shows whether the blocks of a
    kernel agreed.

    Args:
        within: seconds, about as long as OPERATIONS dispatches take.
    """
    spec = replace(a_models_spec(group.rank(), group.size(), Payload.BF16, tokens=8), hidden=256)
    exchange = open_exchange(group, replace(spec, timeout_ns=60 * SECOND))
    given = on_gpu(make_inputs(spec, "max_tokens", 1)[spec.rank])
    outs = [(exchange.empty_padded(), exchange.shapes.source_map()) for _ in range(OPERATIONS)]
    choice, other = random.Random(spec.rank), {0: spec.num_ranks - 1, spec.num_ranks - 1: 0}.get(spec.rank)
    for turn in range(rounds):
        for (rows, _), _ in outs:
            rows.fill_(torch.nan)
        torch.cuda.synchronize()
        dist.barrier(group)
        after = within if spec.rank == 0 else choice.random() * within  # rank 0 has its headers out till then
        masking = threading.Timer(after, exchange.mask, ([other],))
        if other is not None:
            masking.start()
        found = [exchange.dispatch(*given, View.PADDED, out=o, source_map=m) for o, m in outs]
        torch.cuda.synchronize()
        if other is not None:
            masking.join()
            for number, (received, (_, source_map)) in enumerate(zip(found, outs, strict=True)):
                own_rows_in_place(spec, given, received, source_map, f"round {turn}, operation {number}")
        exchange.barrier()
        exchange.reset()
    close_exchange(exchange)


def own_rows_in_place(
    spec: ExchangeSpec,
    given: tuple[torch.Tensor, ...],
    received: Received,
    source_map: tuple[torch.Tensor, torch.Tensor],
    what: str,
) -> None:
    """Of a PADDED view, by the ranges that it came with; the rows of other ranks are not looked at."""
    x, ids, _ = given
    ranges = source_map[1].cpu()
    begins, counts = ranges >> 32, ranges & 0xFFFFFFFF
    of_rank_0 = counts[:, 0].sum()
    assert torch.equal(counts.sum(1), received.counts.cpu().long()), what
    for local, e in enumerate(spec.local_experts):
        tokens = (ids == e).any(1).nonzero().flatten()
        begin, count = int(begins[local, spec.rank]), int(counts[local, spec.rank])
        assert count == len(tokens), f"{what}, expert {e}: {count} own rows"
        where = f"{what}, expert {e}, with {of_rank_0} rows of rank 0"
        assert_equal(source_map[0][local, begin : begin + count], tokens.int(), f"{where}: tokens")
        assert_equal(received.rows[local, begin : begin + count], x[tokens], f"{where}: rows")


def delayed(group: dist.ProcessGroup, op: str) -> None:
    """A rank that is late in one operation is waited for; the wait is charged to it and to nobody else."""
    last, late_ns = group.size() - 1, SECOND // 2
    fault = Fault(last, op, "send_header", Action.DELAY, epoch=3, delay_ns=late_ns)
    exchange = open_exchange(group, small(group, 20 * SECOND))
    exchange.set_faults([fault])
    spec = exchange.spec
    for step in range(2):  # the ranks load their kernels at different times
        run_pair(OnGpu(exchange), "max_tokens", step, View.PADDED)
    exchange.barrier()
    before = exchange.statistics()["peer_wait_ns"]
    for step in range(2, 5):
        run_pair(OnGpu(exchange), "max_tokens", step, View.PADDED)
        exchange.barrier()  # the next operation begins together: its waits are its own
    after = exchange.statistics()
    waits = {peer: after["peer_wait_ns"][op, peer] - before[op, peer] for peer in range(spec.num_ranks)}
    if spec.rank != last:
        assert waits[last] > late_ns // 2, waits
        assert after["peer_wait_max_ns"][op, last] > late_ns // 2, after["peer_wait_max_ns"]
        del waits[last]
    assert all(ns < late_ns // 2 for ns in waits.values()), f"{waits} while rank {last} was late"
    close_exchange(exchange)


def dropped(group: dist.ProcessGroup, op: str) -> None:
    """A rank whose cell for rank 0 is lost is named by rank 0; after a reset the group works on."""
    last = group.size() - 1
    fault = Fault(last, op, "send_header", Action.DROP, epoch=2, peer=0)
    # Rank 0 alone has a short deadline: nobody else can be the first to give up.
    exchange = open_exchange(group, small(group, (2 if group.rank() == 0 else 60) * SECOND))
    exchange.set_faults([fault])
    run_pair(OnGpu(exchange), "max_tokens", 1, View.PADDED)
    exchange.barrier()
    error = _error_of(OnGpu(exchange), step=2)
    if group.rank() == 0:
        assert isinstance(error, PeerTimeout), repr(error)
        assert (error.op, error.peer) == (op, last), error
        assert error.phase.startswith("recv"), error
    else:  # whoever still waited was ended by rank 0's abort
        assert error is None or isinstance(error, GroupAborted), repr(error)
    exchange.barrier()
    exchange.reset()
    run_pair(OnGpu(exchange), "max_tokens", 3, View.PADDED)
    close_exchange(exchange)


def _error_of(gpu: OnGpu, step: int) -> ExchangeError | None:
    try:
        run_pair(gpu, "max_tokens", step, View.PADDED)
    except ExchangeError as error:
        return error
    return None
