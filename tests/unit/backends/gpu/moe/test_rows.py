"""What a transfer beside the other micro-batch waits for, and how long it holds what it reads.

Streams and the exchange are stand-ins that note what is asked of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_server.backends.gpu.moe.moe import add_norm
from ep_server.backends.gpu.moe.rows import Arrival, DeferredCombine, FusedRows, SideRows, Tokens
from ep_server.exchange.api import AddNorm, Received, View
from tests.support.gpu.noted_streams import note_streams
from tests.support.triton.harness import DEVICE

NOTES: list[str] = []
ARRIVAL = Arrival(2, torch.zeros(3, dtype=torch.int32))


class Exchange:
    """Notes where it is called; rows are received as they were sent."""

    spec = SimpleNamespace(num_ranks=4, top_k=8, local_experts=(0, 1, 2))

    device = torch.device("cpu")

    def __init__(self, *, norms: bool = True) -> None:
        self.capacity = self.most_tokens = 0
        self.norms = norms

    def dispatch(
        self,
        x: torch.Tensor,
        ids: Any,
        gates: Any,
        view: View,
        *,
        capacity: int,
        expert_stats: torch.Tensor,
        most_tokens: int,
        next_reads_ahead: bool,
    ) -> Received:
        self.next_reads_ahead = next_reads_ahead
        self.capacity, self.most_tokens = capacity, most_tokens
        expert_stats += len(x)
        NOTES.append("dispatch")
        return Received(x.clone(), torch.ones(1), torch.ones(1), None)

    def combine(
        self,
        expert_out: torch.Tensor,
        received: Received,
        *,
        next_reads_ahead: bool,
        add_norm: AddNorm | None = None,
    ) -> torch.Tensor:
        self.next_reads_ahead = next_reads_ahead
        NOTES.append("combine" if add_norm is None else "combine and norm")
        self.add_norm = add_norm
        return expert_out + 1

    def can_norm(self, norm: AddNorm) -> bool:
        return self.norms

    @contextmanager
    def bounded(self, num_sms: int) -> Iterator[Callable[[], None]]:
        NOTES.append(f"within {num_sms} multiprocessors")
        yield lambda: NOTES.append("waits for the delay")
        NOTES.append("all of them")


def tokens(x: torch.Tensor) -> Tokens:
    return Tokens(x, torch.zeros(len(x), 8, dtype=torch.int64), torch.ones(len(x), 8))


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    note_streams(monkeypatch, NOTES)


def test_both_halves_run_on_the_side_stream_and_the_hook_waits() -> None:
    rows = SideRows(Exchange(), 48)
    x = torch.ones(2, 3)
    arrive = rows.dispatch(tokens(x), ARRIVAL)
    begun = [
        "main records", "side waits for event 1", "on side", "within 48 multiprocessors", "dispatch",
        "all of them", "on main", "side records",
    ]  # fmt: skip
    assert begun == NOTES
    combine = rows.combine(x, arrive())
    assert NOTES[len(begun) : len(begun) + 2] == ["main waits for event 8", "waits for the delay"]
    again = [note.replace("dispatch", "combine").replace("event 1", "event 11") for note in begun]
    assert NOTES[len(begun) + 2 :] == again
    assert torch.equal(combine(), x + 1)
    assert NOTES[-2:] == ["main waits for event 18", "waits for the delay"]


def test_what_a_transfer_reads_lives_until_its_hook_was_called() -> None:
    rows = SideRows(Exchange(), 48)
    x, outputs = torch.ones(2, 3), torch.ones(2, 3)
    held = [weakref.ref(x), weakref.ref(outputs)]
    arrive = rows.dispatch(tokens(x), ARRIVAL)
    del x
    assert held[0]() is not None
    combine = rows.combine(outputs, arrive())
    del outputs, arrive
    assert held[0]() is None and held[1]() is not None
    combine()
    del combine
    assert held[1]() is None


def test_room_for_every_row_that_can_come() -> None:
    """A rank sends a token at most once for each expert that this one owns."""
    exchange, counted = Exchange(), torch.ones(3, dtype=torch.int32)
    arrive = FusedRows(exchange).dispatch(tokens(torch.ones(2, 3)), Arrival(5, counted))
    assert exchange.capacity == 5 * 4 * 3 and exchange.most_tokens == 5 and len(arrive().rows) == 2
    assert counted.tolist() == [3] * 3


def test_only_a_transfer_that_computing_follows_lets_that_begin() -> None:
    """SideStream the computation the next kernel of the stream is another transfer."""
    x, asked = torch.ones(2, 3), []
    ahead = replace(ARRIVAL, read_ahead=True)
    for beside in (False, True):
        exchange = Exchange()
        rows = SideRows(exchange, 48) if beside else FusedRows(exchange)
        received = rows.dispatch(tokens(x), ahead)()
        asked.append(exchange.next_reads_ahead)
        branch = rows.combine(x, received)()
        if isinstance(branch, DeferredCombine):
            branch.run()
        asked.append(exchange.next_reads_ahead)
    assert asked == [True, True, False, False]


@pytest.mark.parametrize("given", [None, 3.0])
@pytest.mark.parametrize("norms", [True, False])
def test_a_combine_that_ends_a_layer_begins_with_its_norm(norms: bool, given: float | None) -> None:
    """In one kernel where the exchange can, else before the kernel that norms."""
    exchange = Exchange(norms=norms)
    rows, out = FusedRows(exchange), torch.ones(2, 64, device=DEVICE)
    branch = rows.combine(out, rows.dispatch(tokens(out), ARRIVAL)())()
    assert isinstance(branch, DeferredCombine) and NOTES == ["dispatch"]
    shared = None if given is None else torch.full_like(out, given)
    residual, weight = torch.zeros_like(out), torch.full_like(out[0], 2.0)
    got = add_norm(replace(branch, shared=shared), residual, weight, 0.0)
    assert NOTES[1:] == ["combine and norm" if norms else "combine"] and exchange.next_reads_ahead
    if norms:
        assert exchange.add_norm == AddNorm(residual, weight, 0.0, shared)
        assert torch.equal(got, out + 1), "not what the exchange has returned"
    else:
        torch.testing.assert_close(residual, torch.full_like(out, 2.0 + (given or 0.0)))
        torch.testing.assert_close(got, torch.full_like(out, 2.0))  # of rows of equal numbers
