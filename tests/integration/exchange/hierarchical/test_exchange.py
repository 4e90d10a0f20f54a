"""The exchange of two parts, NVLink inside a host and host memory between hosts, with the CPU as device.

Shared memory stands for NVLink. On GPUs: tests/gpu/exchange/hierarchical/test_exchange.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ep_server.compat.deep_ep.bootstrap import from_process_group
from ep_server.errors import ConfigError, GroupAborted, InvalidArgument, StartupError
from ep_server.exchange.api import Exchange, ExchangeSpec, Payload, Reduction, View
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange, open_hierarchical
from ep_server.exchange.spec import Waiting
from tests.support.exchange.conformance import Factory, run_cases, run_side_by_side
from tests.support.exchange.process_group import run_group
from tests.support.exchange.sequences import run_sequences
from tests.support.exchange.single import make_single
from tests.support.fabric import hierarchical_ends
from tests.support.fabric.fabric_ends import loopback, needs
from tests.support.fabric.suites import failures, on_one_host

TWO_BY_TWO, ONE_EACH, ONE_AND_THREE, TOGETHER = (0, 0, 1, 1), (0, 1, 2), (5, 2, 2, 2), (0, 0, 0)


def suite(group: dist.ProcessGroup, factory: Factory) -> dict[str, str]:
    return run_cases(group, factory) | run_sequences(group, factory)


@pytest.mark.parametrize(
    "hosts", [TWO_BY_TWO, *(pytest.param(h, marks=pytest.mark.slow) for h in (ONE_EACH, ONE_AND_THREE))]
)
def test_conformance_over_the_network(hosts: tuple[int, ...]) -> None:
    needs("system")
    factory = partial(hierarchical_ends.over_network, loopback(), hosts)
    assert not failures(run_group(suite, len(hosts), args=(factory,), timeout=200))


def many_rows(hosts: tuple[int, ...], spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
    """The exchange of a group's steps with many rows."""
    exchange = hierarchical_ends.over_network(loopback(), hosts, spec, group)
    assert exchange.normal is not None
    assert exchange.normal.normal is None
    return exchange.normal


@pytest.mark.parametrize("hosts", [TWO_BY_TWO, pytest.param(ONE_AND_THREE, marks=pytest.mark.slow)])
def test_conformance_of_many_rows(hosts: tuple[int, ...]) -> None:
    """In the second group a host has one rank, and so no operations for many rows of its own."""
    needs("system")
    factory = partial(many_rows, hosts)
    assert not failures(run_group(suite, len(hosts), args=(factory,), timeout=200))


@pytest.mark.slow  # test_direct has uneven hosts
@pytest.mark.parametrize("hosts", [ONE_AND_THREE, TOGETHER])
def test_conformance_in_shared_memory(hosts: tuple[int, ...]) -> None:
    factory = partial(hierarchical_ends.on_one_host, hosts)
    assert not failures(run_group(suite, len(hosts), args=(factory,), timeout=200))


def test_two_hosts_of_one_rank_give_the_bits_of_one_host() -> None:
    """At a model's sizes: each part has the answer of one rank, so nothing is rounded twice."""
    kinds = tuple((payload, Reduction.RANK) for payload in (Payload.BF16, Payload.FP8))
    two = partial(hierarchical_ends.on_one_host, (0, 1))
    run_group(run_side_by_side, 2, args=(on_one_host, two, kinds))


# -- which part carries what -------------------------------------------------------------------------------

TOKENS, HIDDEN = 8, 256
ROW = 2 * HIDDEN


def carried(exchange: HierarchicalExchange, choices: list[int]) -> dict[str, list[int]]:
    """Bytes that this rank wrote for others, [dispatch, combine], of each part; each token routed alike."""
    parts = {"intra": exchange.intra, "inter": exchange.inter, "both": exchange}
    before = {name: part.statistics()["counters"] for name, part in parts.items()}
    x = torch.full((TOKENS, HIDDEN), float(exchange.spec.rank + 1), dtype=torch.bfloat16)
    ids = torch.tensor([choices]).repeat(TOKENS, 1)
    received = exchange.dispatch_send(x, ids, torch.ones(TOKENS, 4)).recv(View.INDEX)
    rows = received.rows.index_select(0, received.row_ids)
    result = exchange.combine_send(rows, received).recv()
    assert torch.equal(result, x * sum(choice >= 0 for choice in choices))
    exchange.barrier()
    names = [f"bytes/{op}" for op in ("dispatch", "combine")]
    return {
        name: [part.statistics()["counters"][n] - before[name][n] for n in names]
        for name, part in parts.items()
    }


def routings(group: dist.ProcessGroup) -> tuple[list[dict[str, list[int]]], dict[str, object]]:
    spec = ExchangeSpec(group.rank(), 4, (0, 1, 2, 3), TOKENS, HIDDEN, 4)
    exchange = hierarchical_ends.on_one_host(TWO_BY_TWO, spec, group)
    mate, inter = spec.rank ^ 1, (spec.rank + 2) % 4
    cases = [[spec.rank, mate, -1, -1], [inter, inter ^ 1, -1, -1], [0, 1, 2, 3], [-1] * 4]
    made = [carried(exchange, choices) for choices in cases]
    statistics = exchange.statistics()
    exchange.close()
    return made, statistics


def test_rows_of_a_host_stay_there_and_no_others() -> None:
    """Two hosts of two ranks: all local, all remote, everywhere, nowhere."""
    routing = TOKENS * 4 * (4 + 4)  # ids and weights of all tokens, to every other rank of a part
    rows = TOKENS * ROW
    for rank, (made, statistics) in enumerate(run_group(routings, 4)):
        sent = {name: [case[name][0] for case in made] for name in ("intra", "inter")}
        assert sent["intra"] == [routing + n * rows for n in (1, 0, 1, 0)]
        assert sent["inter"] == [3 * routing + n * rows for n in (0, 2, 2, 0)]
        assert [case["intra"][1] for case in made] == [rows, 0, rows, 0]
        assert [case["inter"][1] for case in made] == [0, 2 * rows, 2 * rows, 0]
        for case in made:
            assert case["both"] == [
                intra + inter for intra, inter in zip(case["intra"], case["inter"], strict=True)
            ]
        # From both parts: two cases of two ranks' tokens, one of all four ranks'.
        assert statistics["expert_tokens"] == {rank: TOKENS * (2 + 2 + 4)}
        assert {("dispatch", peer) for peer in range(4) if peer != rank} <= set(statistics["peer_wait_ns"])


# -- sums ---------------------------------------------------------------------------------------------------


def summed(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """What came back, and [R, T, H] the answers of the ranks that own the experts; each token goes to all."""
    rank = group.rank()
    exchange = hierarchical_ends.on_one_host(
        TWO_BY_TWO, ExchangeSpec(rank, 4, (0, 1, 2, 3), TOKENS, HIDDEN, 4), group
    )
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=random).to(torch.bfloat16)
    weights = torch.rand(TOKENS, 4, generator=random)
    received = exchange.dispatch_send(x, torch.arange(4).repeat(TOKENS, 1), weights).recv()
    result = exchange.combine_send(received.rows * (3.0 + rank), received).recv()
    exchange.close()
    scaled = torch.stack([x * (3.0 + owner) for owner in range(4)]).float()
    return result, (weights.T[:, :, None] * scaled).to(torch.bfloat16)


def test_each_parts_sum_is_rounded_and_both_together_once_more() -> None:
    for rank, (result, answers) in enumerate(run_group(summed, 4)):
        here = [0, 1] if rank < 2 else [2, 3]
        intra, inter = (
            sum(answers[owner].float() for owner in part)
            for part in (here, [owner for owner in range(4) if owner not in here])
        )
        parts = [part.to(torch.bfloat16).float() for part in (intra, inter)]
        assert torch.equal(result, (parts[0] + parts[1]).to(torch.bfloat16))
        # Beside one host's single sum: half a unit in the last place of each part more.
        off = (result.float() - (intra + inter)).abs()
        assert (off <= 2**-7 * (intra.abs() + inter.abs())).all()
        assert not torch.equal(result, (intra + inter).to(torch.bfloat16))


# -- what is refused ---------------------------------------------------------------------------------------


def between_hosts(
    group: dist.ProcessGroup, spec: ExchangeSpec, waiting: Waiting | None = None
) -> FabricDeviceExchange:
    """Open on every rank: what a rank aborts next reaches none that is still opening."""
    inter = FabricDeviceExchange(from_process_group(group, spec, waiting=waiting), "cpu")
    dist.barrier(group)
    return inter


def refused(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    spec = ExchangeSpec(rank, 3, (0, 1, 2), 4, 64, 2)
    wrong = {(0, 1, 0): "ranks of a host follow", (0, 1): "one number per rank"}
    for hosts, said in wrong.items():
        inter = between_hosts(group, spec)
        with pytest.raises(ConfigError, match=said):
            hierarchical_ends.beside(inter, hosts)
        with pytest.raises(InvalidArgument, match="closed"):
            inter.barrier()
    masking = between_hosts(group, spec, Waiting(on_timeout="mask"))
    with pytest.raises(ConfigError, match="on_timeout = 'mask'"):
        hierarchical_ends.beside(masking, (0, 0, 1))


def test_hosts_and_settings_that_cannot_be_are_refused_by_name() -> None:
    run_group(refused, 3)


def one_cannot(group: dist.ProcessGroup) -> str:
    """Rank 2 has no exchange inside its host: nobody waits for it in vain."""
    spec = ExchangeSpec(group.rank(), 3, (0, 1, 2), 4, 64, 2, timeout_ns=30 * 10**9)
    inter = between_hosts(group, spec)

    def make(intra: ExchangeSpec, fd: int) -> object:
        if spec.rank == 2:
            raise StartupError("this rank has no GPU")
        return hierarchical_ends.in_memory(intra, fd)

    with pytest.raises((StartupError, GroupAborted)) as caught:
        open_hierarchical(inter, (0, 0, 1), hierarchical_ends.same, make)  # type: ignore[arg-type]
    return type(caught.value).__name__


def test_a_rank_that_cannot_start_ends_the_start_of_all() -> None:
    assert run_group(one_cannot, 3) == ["GroupAborted", "GroupAborted", "StartupError"]


SPEC = ExchangeSpec(0, 1, (0,) * 6, 5, 256, 3, Payload.FP8, num_banks=2)


def alone() -> HierarchicalExchange:
    inter = FabricDeviceExchange(make_single(SPEC, "native"), "cpu")
    return HierarchicalExchange(make_single(SPEC, "native"), inter, (0,))  # type: ignore[arg-type]


def test_a_part_of_another_group_is_refused() -> None:
    inter = FabricDeviceExchange(make_single(SPEC, "native"), "cpu")
    intra = make_single(replace(SPEC, hidden=128), "native")
    with pytest.raises(ConfigError, match=r"intra\.spec .* that of ranks \[0\]"):
        HierarchicalExchange(intra, inter, (0,))  # type: ignore[arg-type]
    intra.close()
    inter.close()


def test_foreign_handles_and_use_after_close_are_refused() -> None:
    one, other = alone(), alone()
    x, ids = torch.ones(2, 256, dtype=torch.bfloat16), torch.tensor([[0, 1, 2], [3, -1, -1]])
    pending = one.dispatch_send(x, ids, torch.ones(2, 3))
    with pytest.raises(InvalidArgument, match="one of compact, padded, index"):
        pending.recv("diagonal")  # type: ignore[arg-type]
    received = pending.recv()
    answers = torch.zeros(received.rows.shape, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument) as caught:
        other.combine_send(answers, received)
    assert caught.value.field == "received.handle"
    returning = one.combine_send(answers, received)
    with pytest.raises(InvalidArgument, match=r"out.*float32"):
        returning.recv(torch.empty(2, 256))
    assert not returning.recv().any()
    for exchange in (one, other):
        exchange.close()
        exchange.close()
        with pytest.raises(InvalidArgument, match="closed"):
            exchange.barrier()


def poisoned(group: dist.ProcessGroup) -> None:
    """Weights at combine: the part inside a host, which reads them at recv() over NVLink, has its own."""
    placement = tuple(range(group.size()))
    spec = ExchangeSpec(
        group.rank(), group.size(), placement, TOKENS, HIDDEN, 2, Payload.BF16, Reduction.SOURCE
    )
    exchange = hierarchical_ends.on_one_host((0, 1), spec, group)
    seen, send = [], exchange.intra.combine_send

    def noted(*args: object, **kwargs: object) -> object:
        seen.append(args[2])
        return send(*args, **kwargs)

    exchange.intra.combine_send = noted
    x, ids = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 1]]).repeat(TOKENS, 1)
    received = exchange.dispatch_send(x, ids, None).recv(View.COMPACT)
    weights = torch.full((TOKENS, 2), 0.5)
    pending = exchange.combine_send(received.rows.clone(), received, weights)
    weights.fill_(torch.nan)
    assert torch.equal(seen[0], torch.full((TOKENS, 2), 0.5))
    assert torch.equal(pending.recv(), x)
    exchange.barrier()
    exchange.close()


def test_weights_at_combine_may_be_overwritten_after_the_send() -> None:
    run_group(poisoned, 2)
