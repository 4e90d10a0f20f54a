"""Operations of another exchange or of before a reset, and routing of a broken peer: refused, harmless."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

import pytest
import torch

from ep_server.errors import GroupAborted, InvalidArgument, ProtocolViolation
from ep_server.exchange.api import ExchangeSpec, PendingDispatch, Received, Reduction, View
from ep_server.exchange.host import HostExchange, open_shm
from ep_server.exchange.segment import create_segment

HIDDEN, MAX_TOKENS, TOP_K, EXPERTS = 72, 6, 3, 4
FIRST_BANK = 1  # epochs count from 1


class Alone:
    """A group of one rank whose memory the test may write, as a broken peer would."""

    def __init__(self, max_tokens: int = MAX_TOKENS, experts: int = EXPERTS) -> None:
        self.spec = ExchangeSpec(0, 1, (0,) * experts, max_tokens, HIDDEN, TOP_K)
        self.fd = create_segment(self.spec)
        self.exchange = open_shm(self.spec, self.fd)

    def close(self) -> None:
        self.exchange.close()
        os.close(self.fd)

    def write_ids(self, bank: int, token: int, ids: list[int]) -> None:
        layout = self.exchange.layout
        at = layout.region(0) + layout.ids_at(bank, 0) + token * TOP_K * 4
        os.pwrite(self.fd, struct.pack(f"{TOP_K}i", *ids), at)

    def dispatch_send(self, tokens: int = MAX_TOKENS) -> PendingDispatch:
        x = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
        ids = torch.tensor([[0, 3, -1]]).repeat(tokens, 1)
        return self.exchange.dispatch_send(x, ids, torch.ones(tokens, TOP_K))

    def works(self) -> None:
        """Every bank comes round twice."""
        for _ in range(2 * self.spec.num_banks):
            received = self.dispatch_send().recv()
            assert received.counts.tolist() == [MAX_TOKENS, 0, 0, MAX_TOKENS][: len(received.counts)]
            assert (self.exchange.combine_send(received.rows, received).recv() == 2).all()


@pytest.fixture
def make() -> Iterator[Callable[..., Alone]]:
    made: list[Alone] = []

    def one(**sizes: int) -> Alone:
        made.append(Alone(**sizes))
        return made[-1]

    yield one
    for group in made:
        group.close()


def answer_to(received: Received) -> torch.Tensor:
    """Experts' outputs of the right shape, whatever the view."""
    return torch.zeros(int(received.offsets[-1]), HIDDEN, dtype=torch.bfloat16)


def uses_of(exchange: HostExchange, received: Received) -> list[Callable[[], object]]:
    answer = answer_to(received)
    return [
        lambda: exchange.combine_send(answer, received),
        lambda: exchange.release(received),
    ]


def test_what_another_exchange_received_is_refused(make: Callable[..., Alone]) -> None:
    one, other = make(), make(max_tokens=600, experts=64)
    received = other.dispatch_send(600).recv(View.INDEX)
    for use in uses_of(one.exchange, received):
        with pytest.raises(InvalidArgument, match=r"of another exchange.*must be of a dispatch of this"):
            use()
    dispatch, native = received.handle.state, one.exchange.group.native
    combine = other.exchange.start_combine(
        received.handle, answer_to(received).data_ptr(), None, Reduction.RANK
    )
    room = torch.zeros(1 << 16)
    calls: list[Callable[[], object]] = [
        lambda: native.dispatch_wait(dispatch),
        lambda: native.dispatch_expand(dispatch, 0, *[room.data_ptr()] * 5),
        lambda: native.combine_recv(combine, room.data_ptr()),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match="of this exchange, not of another one"):
            call()
    one.works()


def test_an_exchange_at_the_same_address_is_another_one(make: Callable[..., Alone]) -> None:
    first = make()
    received = first.dispatch_send().recv()
    first.exchange.close()
    for _ in range(20):  # the allocator gives the same memory again and again
        with pytest.raises(InvalidArgument, match="of another exchange"):
            make().exchange.combine_send(received.rows, received)


@pytest.mark.parametrize("busy", [False, True])
def test_operations_of_before_a_reset_are_dropped(make: Callable[..., Alone], busy: bool) -> None:
    group = make()
    held = group.dispatch_send().recv(View.INDEX)
    received = group.dispatch_send().recv()
    combine = group.exchange.combine_send(received.rows, received)
    dispatch = group.dispatch_send()
    group.exchange.group.reset()
    if busy:  # the cells that the old operations would look at are newer ones now
        group.works()
    halves: list[Callable[[], object]] = [dispatch.recv, combine.recv]
    for use in halves + uses_of(group.exchange, received) + uses_of(group.exchange, held):
        with pytest.raises(InvalidArgument, match="of this generation: reset\\(\\) dropped it"):
            use()
    group.exchange.barrier()  # not aborted
    group.works()


@pytest.mark.parametrize("ids", [[0, 0, 0], [0, 3, 0], [1, 3, 3], [0, 4, -1], [1 << 30, 0, 1]])
@pytest.mark.parametrize("view", [View.COMPACT, View.PADDED])
def test_routing_that_no_sender_may_write_is_a_violation(
    make: Callable[..., Alone], view: View, ids: list[int]
) -> None:
    group = make()
    pending = group.dispatch_send()
    for token in range(MAX_TOKENS):
        group.write_ids(FIRST_BANK, token, ids)
    with pytest.raises(ProtocolViolation, match="dispatch/recv_header, rank 0, peer 0"):
        pending.recv(view)
    with pytest.raises(GroupAborted):
        group.exchange.barrier()
    group.exchange.group.reset()
    group.works()


def test_a_receive_that_failed_leaves_nothing_to_the_next_one(make: Callable[..., Alone]) -> None:
    group = make()
    pending = group.dispatch_send()
    group.write_ids(FIRST_BANK, MAX_TOKENS - 1, [0, 99, -1])
    for _ in range(3):
        with pytest.raises(ProtocolViolation):
            pending.recv(View.PADDED)
    group.write_ids(FIRST_BANK, MAX_TOKENS - 1, [0, 3, -1])
    received = pending.recv(View.PADDED)
    assert received.counts.tolist() == [MAX_TOKENS, 0, 0, MAX_TOKENS]
    assert received.handle.state.num_rows == 2 * MAX_TOKENS
