"""The exchange behind staging in host memory: the conformance suite over the loopback, staging, misuse.

Without a GPU the device is the CPU: staging, order and checks are the same, copies end at once. With one, two
ranks share it and run the suite behind slow kernels (marker gpu).
"""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ep_server.compat.deep_ep.bootstrap import from_process_group
from ep_server.errors import ConfigError, InvalidArgument, StartupError
from ep_server.exchange.api import Exchange, ExchangeSpec, Payload, Reduction, View
from ep_server.exchange.fabric.copies import HostCopies, Slot
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from tests.support.exchange.conformance import Factory, run_cases, run_pair
from tests.support.exchange.process_group import run_group
from tests.support.exchange.routing import make_inputs
from tests.support.exchange.sequences import run_sequences
from tests.support.exchange.single import make_single
from tests.support.fabric import mixed_ends
from tests.support.fabric.fabric_ends import connected, loopback, needs, through_group
from tests.support.fabric.suites import failures


def over_network(options: FabricOptions, spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
    return FabricDeviceExchange(connected(FabricLink(spec, options), through_group(group)), "cpu")


def in_a_mixed_group(options: FabricOptions, spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
    """Two hosts of two ranks, which read rows of other hosts in one another's memory."""
    return FabricDeviceExchange(mixed_ends.from_process_group(options, (0, 0, 1, 1), spec, group), "cpu")


def on_one_host(spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
    return FabricDeviceExchange(from_process_group(group, spec), "cpu", copies=WatchedCopies())


def suite(group: dist.ProcessGroup, factory: Factory) -> dict[str, str]:
    return run_cases(group, factory) | run_sequences(group, factory)


# The mixed group below runs on the system's too.
@pytest.mark.parametrize(
    ("library", "num_ranks"), [pytest.param("system", 3, marks=pytest.mark.slow), ("wheel", 2)]
)
def test_conformance_over_the_network(library: str, num_ranks: int) -> None:
    needs(library)
    assert not failures(
        run_group(suite, num_ranks, args=(partial(over_network, loopback(library)),), timeout=150)
    )


def test_conformance_in_a_mixed_group() -> None:
    needs("system")
    assert not failures(run_group(suite, 4, args=(partial(in_a_mixed_group, loopback()),), timeout=200))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("program", ["whole_suite", "in_flight", "refused"])
@pytest.mark.parametrize("library", ["wheel", "system"])
def test_on_a_gpu_behind_slow_kernels(library: str, program: str) -> None:
    needs(library)
    run = getattr(importlib.import_module("tests.support.fabric.gpu_host_staging"), program)
    results = run_group(run, 2, args=(loopback(library),), timeout=300)
    assert program != "whole_suite" or not failures(results)


# -- staging -------------------------------------------------------------------------------------------------


class WatchedCopies(HostCopies):
    """Copies to the device that read their staging until they are waited for: nobody may write it before."""

    def __init__(self) -> None:
        self.read: dict[Slot, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def delivery(self, slot: Slot, *, into: torch.Tensor | None = None) -> Watched:
        assert slot not in self.read, "begun while an earlier operation's copies read the same staging"
        return Watched(self.read.setdefault(slot, []))

    def reuse(self, slot: Slot) -> None:
        for staged, then in self.read.pop(slot, []):
            assert torch.equal(staged, then), "staging was written while a copy read it"


class Watched(HostCopies):
    def __init__(self, read: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.read = read

    def copy(self, out: torch.Tensor, staged: torch.Tensor) -> None:
        out.copy_(staged)
        self.read.append((staged.view(torch.uint8), staged.clone().view(torch.uint8)))


@pytest.mark.slow  # test_bounce_streams finds such a write by order, in one operation after another
def test_staging_is_not_overwritten_during_device_copies() -> None:
    """The whole suite, whose sequences have as many operations in flight as there are banks."""
    assert not failures(run_group(suite, 2, args=(on_one_host,), timeout=150))


def test_a_missing_wait_would_be_noticed() -> None:
    exchange = alone(copies=(copies := WatchedCopies()))
    run_pair(exchange, "uniform", 1, View.COMPACT)
    slot = next(iter(copies.read))
    with pytest.raises(AssertionError, match="begun while"):
        copies.delivery(slot)
    staged, _ = copies.read[slot][0]
    staged[...] = 0x55
    with pytest.raises(AssertionError, match="written while"):
        copies.reuse(slot)
    exchange.close()


SPEC = ExchangeSpec(0, 1, (0,) * 6, 5, 256, 3, Payload.FP8, num_banks=2)


def alone(spec: ExchangeSpec = SPEC, **options: object) -> FabricDeviceExchange:
    return FabricDeviceExchange(make_single(spec, "native"), "cpu", **options)


def test_staging_is_as_large_as_the_spec_says() -> None:
    """T = 5, H = 256, K = 3, E_local = 6: R * T = 5 rows with two scales, at most 15 entries, two banks."""
    sent = 5 * 256 * 2 + 5 * 3 * (8 + 4) + 15 * 256 * 2
    received = 5 * (256 + 2 * 4) + 6 * 4 + (3 * 15 + 13) * 8
    returned = 5 * 256 * 2
    exchange = alone()
    assert exchange.staging.staging_bytes == sent + 2 * (received + returned)
    exchange.close()


def test_caller_may_overwrite_inputs_and_owns_results() -> None:
    exchange = alone()
    mine = make_inputs(SPEC, "max_tokens", 3)[0]
    received = [exchange.dispatch_send(mine.x, mine.ids, mine.weights).recv(view) for view in View]
    kept = [each.rows.clone() for each in received]
    for _ in range(2 * SPEC.num_banks):
        other = make_inputs(SPEC, "max_tokens", 4)[0]
        exchange.dispatch_send(other.x, other.ids, other.weights).recv()
    for before, each in zip(kept, received, strict=True):
        assert torch.equal(before.view(torch.uint8), each.rows.view(torch.uint8)), each.view
    exchange.close()


# -- misuse --------------------------------------------------------------------------------------------------


def test_tensor_on_wrong_device_is_named_before_sending() -> None:
    exchange = alone()
    mine, elsewhere = make_inputs(SPEC, "uniform", 1)[0], torch.device("meta")
    for name, given in (
        ("x", (mine.x.to(elsewhere), mine.ids, mine.weights)),
        ("topk_ids", (mine.x, mine.ids.to(elsewhere), mine.weights)),
        ("topk_weights", (mine.x, mine.ids, mine.weights.to(elsewhere))),
    ):
        with pytest.raises(InvalidArgument, match=r"on meta.* on cpu") as caught:
            exchange.dispatch_send(*given)
        assert caught.value.field == name
    for view in (View.COMPACT, View.PADDED):
        received = exchange.dispatch_send(mine.x, mine.ids, mine.weights).recv(view)
        answer = torch.empty(received.rows.shape, dtype=torch.bfloat16)
        with pytest.raises(InvalidArgument, match=r"expert_out.* on meta"):
            exchange.combine_send(answer.to(elsewhere), received)
        pending = exchange.combine_send(answer, received)
        with pytest.raises(InvalidArgument, match=r"out.* on meta"):
            pending.recv(torch.empty(mine.x.shape, dtype=torch.bfloat16, device=elsewhere))
        assert pending.recv().device.type == "cpu"
    exchange.close()


def test_a_handle_of_another_exchange_is_refused() -> None:
    one, other = alone(), alone()
    mine = make_inputs(SPEC, "uniform", 1)[0]
    received = one.dispatch_send(mine.x, mine.ids, mine.weights).recv()
    with pytest.raises(InvalidArgument) as caught:
        other.combine_send(torch.zeros(received.rows.shape, dtype=torch.bfloat16), received)
    assert caught.value.field == "received.handle"
    for exchange in (one, other):
        exchange.close()


def test_a_view_that_does_not_exist_is_refused() -> None:
    exchange, mine = alone(), make_inputs(SPEC, "uniform", 1)[0]
    pending = exchange.dispatch_send(mine.x, mine.ids, mine.weights)
    with pytest.raises(InvalidArgument, match="one of compact, padded, index"):
        pending.recv("diagonal")
    assert len(pending.recv().rows)
    exchange.close()


@pytest.mark.parametrize(
    ("device", "error", "said"),
    [
        ("meta", ConfigError, "cpu or cuda"),
        pytest.param(
            "cuda",
            StartupError,
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device"),
        ),
    ],
)
def test_impossible_device_is_refused_and_closes_the_exchange(
    device: str, error: type[Exception], said: str
) -> None:
    inner = make_single(SPEC, "native")
    with pytest.raises(error, match=said):
        FabricDeviceExchange(inner, device)
    with pytest.raises(InvalidArgument, match="closed"):
        inner.barrier()


def test_closed_means_closed_and_can_be_said_twice() -> None:
    exchange = alone()
    exchange.close()
    exchange.close()
    with pytest.raises(InvalidArgument, match="closed"):
        exchange.barrier()


def test_weights_may_come_with_combine_where_the_source_reduces() -> None:
    spec = ExchangeSpec(0, 1, (0,) * 4, 4, 128, 2, Payload.BF16, Reduction.SOURCE)
    exchange, mine = alone(spec), make_inputs(spec, "max_tokens", 2)[0]
    received = exchange.dispatch_send(mine.x, mine.ids, None).recv()
    with pytest.raises(InvalidArgument) as caught:
        exchange.combine_send(received.rows, received, mine.weights[:, :1])
    assert caught.value.field == "topk_weights"
    sums = exchange.combine_send(received.rows, received, mine.weights).recv()
    expected = (mine.x.float()[:, None] * mine.weights[:, :, None]).sum(1)
    assert torch.allclose(sums.float(), expected, rtol=2**-7)
    exchange.close()
