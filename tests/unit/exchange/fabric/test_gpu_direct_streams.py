"""What a FabricDeviceExchange enqueues on a GPU's streams: no access races with another, nor with the NIC's.

Runs without a GPU (stream_races.py). The card reads rows when they are sent: that counts as an access of the
host. That the checker notices a missing wait is tested by leaving out each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_server.exchange.api import ExchangeSpec, Payload
from ep_server.exchange.fabric.copies import CudaCopies
from ep_server.exchange.fabric.device import FabricDeviceExchange, Staging
from ep_server.exchange.fabric.device_rows import DeviceRows
from ep_server.exchange.fabric.gpu_direct import GpuDirect, RowsFabric
from ep_server.exchange.shm import PendingDispatch
from tests.support.fabric.direct_ends import CPU, over_shm, own_name, poisoned_rows
from tests.support.fabric.stream_programs import LEFT_OUT as LEFT_OUT_OF_BOTH
from tests.support.fabric.stream_programs import Operation, Sums, assert_sums, run_alone, spec_of, timelines
from tests.support.fabric.stream_races import HOST, Races, watched


class Noted(RowsFabric):
    """The card reads what is sent, and the host its tables."""

    races: Races

    def next_bank(self, op: int) -> int:
        self.bank = super().next_bank(op)
        return self.bank

    def send_rows(self, ids: torch.Tensor, weights: torch.Tensor | None) -> PendingDispatch:
        rows, _ = self.views.index(self.bank)
        own = rows[self.spec.rank * self.spec.max_tokens :][: len(ids)]
        self.races.note(HOST, [own, ids, *([] if weights is None else [weights])], [], "send_rows")
        return super().send_rows(ids, weights)

    def send_answers(self, *given: Any) -> Any:
        self.races.note(
            HOST, [self.rows.leaving(self.bank), self.rows.arrived(self.bank)], [], "send_answers"
        )
        return super().send_answers(*given)


def explored(replace: Callable[..., None], payload: Payload = Payload.BF16) -> tuple[Races, Sums]:
    spec = spec_of(payload)
    with watched(replace) as races:
        inner = opened(spec, races)
        exchange = FabricDeviceExchange(
            inner, CPU, staging=Staging.GPU_DIRECT, copies=CudaCopies(CPU, spec.timeout_ns)
        )
        sums = run_alone(exchange, 4)
        banks_change_streams(exchange)
        exchange.close()
    return races, sums


def opened(spec: ExchangeSpec, races: Races) -> Noted:
    inner = Noted(spec, poisoned_rows(spec, DeviceRows.HOST, 0), own_name(over_shm()))
    inner.races = races
    inner.connect([inner.address], 1)
    return inner


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
