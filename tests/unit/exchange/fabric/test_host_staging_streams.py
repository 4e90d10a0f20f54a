"""What a FabricDeviceExchange enqueues on a GPU's streams, in which order: no access races with another.

Runs without a GPU (stream_races.py). That the checker notices a missing wait is tested by leaving out each.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ep_server.errors import ExchangeError
from ep_server.exchange.api import Payload
from ep_server.exchange.fabric import host_staging
from ep_server.exchange.fabric.copies import CudaCopies
from ep_server.exchange.fabric.device import FabricDeviceExchange
from tests.support.exchange.single import make_single
from tests.support.fabric import stream_races
from tests.support.fabric.stream_programs import (
    LEFT_OUT,
    Noted,
    Sums,
    assert_sums,
    on_gpu,
    run_alone,
    spec_of,
    timelines,
    views_on_gpu,
)
from tests.support.fabric.stream_races import HOST, Races, watched

CPU = torch.device("cpu")


def explored(replace: Callable[..., None], payload: Payload = Payload.BF16) -> tuple[Races, Sums]:
    spec = spec_of(payload)
    replace(host_staging, "CHUNK_BYTES", 1024)  # several chunks
    with watched(replace) as races:
        inner = Noted(make_single(spec, "native"), races)
        exchange = FabricDeviceExchange(inner, CPU, copies=CudaCopies(CPU, spec.timeout_ns))
        views_on_gpu(exchange.shapes)
        sums = run_alone(exchange, 4)
        exchange.close()
    return races, sums


@pytest.mark.parametrize("payload", [Payload.BF16, Payload.FP8])
def test_no_access_races_with_another(monkeypatch: pytest.MonkeyPatch, payload: Payload) -> None:
    races, sums = explored(monkeypatch.setattr, payload)
    assert races.found == []
    assert timelines(races) == {HOST, "caller", "stream 1", "stream 2"}  # of the copies, of the caller
    assert_sums(sums, payload)


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_wait_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    monkeypatch.setattr(*LEFT_OUT[left_out])
    races, _ = explored(monkeypatch.setattr)
    assert races.found


def test_a_stream_that_never_ends_is_reported_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_races.Event, "query", lambda self: False)
    with watched(monkeypatch.setattr):
        copies = CudaCopies(CPU, timeout_ns=20_000_000)
        staged = copies.staging((4,), torch.float32)
        with pytest.raises(ExchangeError, match=r"tensors on their way to the host in 0.02 s"):
            copies.fetch((staged, on_gpu(torch.ones(4))))()


def test_a_wait_that_nobody_asked_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch.setattr) as races:
        int(on_gpu(torch.ones(1))[0])
    assert races.found == ["aten::_local_scalar_dense waits for the GPU"]
