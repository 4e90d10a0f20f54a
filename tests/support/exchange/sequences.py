"""Orders of halves that an exchange must survive, each a function of an exchange; run inside one rank.

Sequences are collective: every rank runs the same one. An exchange is made for each and closed after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import HookNotCalled, InvalidArgument
from ep_server.exchange.api import Exchange, Payload, Reduction, View
from ep_server.exchange.validate import input_dtype
from tests.support.exchange.conformance import UNEVEN, Factory, Operation, Shape, failure_of, run_pair

SHAPE = Shape(5, 65, 3, UNEVEN)
MIXED = ("uniform", "zipf", "nobody", "all_to_one", "empty_rank", "single_token", "max_tokens")


def two_micro_batches(exchange: Exchange) -> None:
    """The overlapped decoder layer: the halves of two batches interleave, an odd number of times."""
    for layer in range(5):
        a = Operation(exchange, MIXED[layer % 7], layer, View.COMPACT)
        b = Operation(exchange, MIXED[(layer + 3) % 7], layer + 100, View.COMPACT)
        a.receive().answer()
        b.receive()
        a.finish()
        b.answer().finish()


def receives_in_reverse(exchange: Exchange) -> None:
    """Hooks are called in another order than the sends."""
    for layer in range(3):
        a = Operation(exchange, "uniform", layer, View.COMPACT)
        b = Operation(exchange, "zipf", layer + 50, View.PADDED)
        b.receive()
        a.receive()
        a.answer()
        b.answer()
        b.finish()
        a.finish()


def combine_hook_after_next_dispatch(exchange: Exchange) -> None:
    """The combine of a layer is received only after the next dispatch has been received."""
    last = Operation(exchange, "uniform", 0, View.COMPACT).receive().answer()
    for layer in range(1, 6):
        following = Operation(exchange, MIXED[layer], layer, View.COMPACT).receive()
        last.finish()
        last = following.answer()
    last.finish()


def dispatches_without_combine(exchange: Exchange) -> None:
    """An odd number of dispatches is never combined; the ranks may run ahead of one another."""
    for step in range(7):
        Operation(exchange, MIXED[step % 7], step, View.COMPACT).receive()
        if step % 3 == 2:
            run_pair(exchange, "zipf", step + 20, View.PADDED)


def every_bank_in_flight(exchange: Exchange) -> None:
    """As many dispatches are open as there are banks, three rounds of them."""
    for turn in range(3):
        banks = range(exchange.spec.num_banks)
        operations = [Operation(exchange, MIXED[b % 7], 10 * turn + b, View.COMPACT) for b in banks]
        for operation in operations:
            operation.receive().answer().finish()


def indexed_views_in_flight(exchange: Exchange) -> None:
    """In-place views of two banks are read while the other bank is written, where there are such views."""
    if View.INDEX not in exchange.capabilities.views:
        return
    for layer in range(3):
        a = Operation(exchange, "uniform", layer, View.INDEX).receive()
        b = Operation(exchange, "zipf", layer + 9, View.INDEX).receive()
        a.answer().finish()
        b.answer().finish()


def votes_between_halves(exchange: Exchange) -> None:
    """Records of every length are gathered, also while a dispatch is open."""
    rank, ranks = exchange.spec.rank, exchange.spec.num_ranks
    for length in (0, 1, 63, 64):
        operation = Operation(exchange, "uniform", length, View.COMPACT)
        gathered = exchange.all_gather(bytes([rank + 1]) * length)
        assert gathered == [bytes([peer + 1]) * length for peer in range(ranks)]
        operation.receive()
        exchange.barrier()
        operation.answer().finish()
    with pytest.raises(InvalidArgument):
        exchange.all_gather(bytes(65))


def unreceived_dispatch(exchange: Exchange) -> None:
    """The bank of a dispatch that was never received comes round."""
    for step in range(exchange.spec.num_banks):
        Operation(exchange, "uniform", step, View.COMPACT)
    with pytest.raises(HookNotCalled):
        Operation(exchange, "uniform", 99, View.COMPACT)


def unreceived_combine(exchange: Exchange) -> None:
    """The bank of a combine that was never received comes round."""
    for step in range(exchange.spec.num_banks):
        Operation(exchange, "uniform", step, View.COMPACT).receive().answer()
    late = Operation(exchange, "uniform", 99, View.COMPACT).receive()
    with pytest.raises(HookNotCalled):
        late.answer()


def bad_arguments(exchange: Exchange) -> None:
    """Every misuse is refused before anything is sent: the group works on."""
    spec = exchange.spec
    good_x = torch.zeros(2, spec.hidden, dtype=input_dtype(spec))
    good_ids = torch.tensor([[0, 1, 2], [3, -1, -1]])
    good_weights = torch.ones(2, 3)
    wrong = [
        (torch.zeros(2, spec.hidden + 1), good_ids, good_weights),
        (good_x.double(), good_ids, good_weights),
        (torch.zeros(2, 2 * spec.hidden)[:, ::2], good_ids, good_weights),
        (torch.zeros(6, spec.hidden), torch.zeros(6, 3, dtype=torch.int64), torch.ones(6, 3)),
        (good_x, good_ids[:1], good_weights),
        (good_x, good_ids.to(torch.int16), good_weights),
        (good_x, torch.tensor([[0, 1, 7], [3, -1, -1]]), good_weights),
        (good_x, torch.tensor([[0, 1, -2], [3, -1, -1]]), good_weights),
        (good_x, torch.tensor([[0, 1, 1], [3, -1, -1]]), good_weights),
        (good_x, good_ids, good_weights[:, :2]),
        (good_x, good_ids, good_weights.double()),
    ]
    for x, ids, weights in wrong:
        with pytest.raises(InvalidArgument) as caught:
            exchange.dispatch_send(x, ids, weights)
        assert caught.value.field
        assert caught.value.allowed
    operation = Operation(exchange, "uniform", 3, View.COMPACT).receive()
    for expert_out in (torch.zeros(1000, spec.hidden), torch.zeros(len(operation.received.rows), 1)):
        with pytest.raises(InvalidArgument):
            exchange.combine_send(expert_out, operation.received)
    with pytest.raises(InvalidArgument):
        operation.pending.recv()
    operation.answer().finish()
    with pytest.raises(InvalidArgument):
        operation.returning.recv()


def weights_missing_or_twice(exchange: Exchange) -> None:
    """Weights are given once: at dispatch or at combine, and at dispatch where ranks reduce."""
    x = torch.zeros(1, exchange.spec.hidden, dtype=input_dtype(exchange.spec))
    ids, weights = torch.tensor([[0, 1, 2]]), torch.ones(1, 3)
    if exchange.spec.reduction is Reduction.RANK:
        with pytest.raises(InvalidArgument):  # at once, or where the last chance to give them is missed
            received = exchange.dispatch_send(x, ids, None).recv()
            exchange.combine_send(torch.zeros_like(received.rows), received)
        return
    for first, second in ((weights, weights), (None, None), (None, weights.double()), (None, weights[:, :1])):
        received = exchange.dispatch_send(x, ids, first).recv()
        with pytest.raises(InvalidArgument):
            exchange.combine_send(torch.zeros_like(received.rows), received, second)


SEQUENCES: dict[str, Callable[[Exchange], None]] = {
    function.__name__: function
    for function in (
        two_micro_batches,
        receives_in_reverse,
        combine_hook_after_next_dispatch,
        dispatches_without_combine,
        every_bank_in_flight,
        indexed_views_in_flight,
        votes_between_halves,
        unreceived_dispatch,
        unreceived_combine,
        bad_arguments,
        weights_missing_or_twice,
    )
}


def sequence_names() -> list[str]:
    """Names of all sequences, as run_sequences reports them."""
    return [f"{name}-{reduction.value}" for name in SEQUENCES for reduction in Reduction]


def run_sequences(
    group: dist.ProcessGroup, factory: Factory, *, payload: Payload = Payload.FP32
) -> dict[str, str]:
    """Runs every sequence on this rank, with either reduction."""
    results = {}
    for name, sequence in SEQUENCES.items():
        for reduction in Reduction:
            exchange = factory(SHAPE.spec(group.rank(), group.size(), payload, reduction), group)
            results[f"{name}-{reduction.value}"] = failure_of(partial(sequence, exchange))
            dist.barrier(group)
            exchange.close()
    return results
