"""What a FabricDeviceExchange enqueues on a GPU's streams: no access races with another, nor with the NIC's.

Runs without a GPU (stream_races.py). The card reads rows when they are sent: that counts as an access of the
host. That the checker notices a missing wait is tested by leaving out each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_server.exchange.api import Payload, PendingDispatch
from ep_server.exchange.fabric.copies import CudaCopies
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.gpu_direct import GpuDirect
from ep_server.exchange.fabric.link import FabricLink
from tests.support.fabric.direct_ends import CPU, over_shm, own_name, poisoned_rows
from tests.support.fabric.stream_programs import LEFT_OUT as LEFT_OUT_OF_BOTH
from tests.support.fabric.stream_programs import (
    Operation,
    Sums,
    assert_sums,
    run_alone,
    spec_of,
    timelines,
    views_on_gpu,
)
from tests.support.fabric.stream_races import HOST, Races, watched


def noted(exchange: FabricDeviceExchange, races: Races) -> None:
    """From now on, notes that the card reads what is sent, and the host its tables."""
    direct, inner, spec = exchange.staging, exchange.inner, exchange.spec
    assert isinstance(direct, GpuDirect)
    next_bank, start_dispatch, start_combine = direct.next_bank, inner.start_dispatch, inner.start_combine
    bank = 0

    def taken(op: int) -> int:
        nonlocal bank
        bank = next_bank(op)
        return bank

    def dispatched(x: int, ids: torch.Tensor, weights: torch.Tensor | None) -> PendingDispatch:
        rows, _ = inner._banks[bank]
        own = rows[spec.rank * spec.max_tokens :][: len(ids)]
        races.note(HOST, [own, ids, *([] if weights is None else [weights])], [], "start_dispatch")
        return start_dispatch(x, ids, weights)

    def combined(*given: Any) -> Any:
        races.note(HOST, [direct.rows.leaving(bank), direct.rows.arrived(bank)], [], "start_combine")
        return start_combine(*given)

    direct.next_bank = taken  # type: ignore[method-assign]
    inner.start_dispatch, inner.start_combine = dispatched, combined  # type: ignore[method-assign]


def explored(replace: Callable[..., None], payload: Payload = Payload.BF16) -> tuple[Races, Sums]:
    spec = spec_of(payload)
    with watched(replace) as races:
        rows = poisoned_rows(spec, DeviceRows.HOST, 0)
        link = FabricLink(spec, own_name(over_shm()), rows=rows)
        inner = link.exchange()
        link.connect([link.address], 1)
        exchange = FabricDeviceExchange(inner, CPU, rows, copies=CudaCopies(CPU, spec.timeout_ns))
        noted(exchange, races)
        views_on_gpu(exchange.shapes)
        sums = run_alone(exchange, 4)
        banks_change_streams(exchange)
        exchange.close()
    return races, sums


def banks_change_streams(exchange: FabricDeviceExchange) -> None:
    """Each bank is received on one stream, and filled next from the other, by which nothing was combined."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for turn in range(6):
        Operation(exchange, streams[turn // 2 % 2], turn).receive()


@pytest.mark.parametrize("payload", [Payload.BF16, Payload.FP8])
def test_no_access_races_with_another(monkeypatch: pytest.MonkeyPatch, payload: Payload) -> None:
    races, sums = explored(monkeypatch.setattr, payload)
    assert races.found == []
    assert {HOST, "caller", "stream 1", "stream 2"} <= timelines(races)
    assert_sums(sums, payload)


def no_wait_for_reading(self: GpuDirect) -> None:
    held, self._held = self._held, []
    for _, _, release in held:
        release()


LEFT_OUT = {
    "the card for rows": LEFT_OUT_OF_BOTH["the host for copies at all"],
    "a bank for its reading": (GpuDirect, "_give_back", no_wait_for_reading),
}


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_wait_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    monkeypatch.setattr(*LEFT_OUT[left_out])
    races, _ = explored(monkeypatch.setattr)
    assert races.found
