"""Groups in which some ranks share a host: the conformance suite, what crosses the network, and faults."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ep_server import _C
from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import Exchange, ExchangeSpec, View
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.host import HostExchange, open_shm
from ep_server.exchange.segment import HostShare, create_host_share, create_segment
from ep_server.exchange.spec import geometry_of
from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts
from tests.support.exchange import fault_programs as programs
from tests.support.exchange.conformance import run_cases, run_side_by_side
from tests.support.exchange.fault_programs import operation, spec_of
from tests.support.exchange.process_group import run_group
from tests.support.exchange.ranks import Peer, Ranks, run_ranks
from tests.support.exchange.sequences import run_sequences
from tests.support.fabric.fabric_ends import loopback, needs
from tests.support.fabric.mixed_ends import from_process_group, mixed_ends
from tests.support.fabric.suites import failures, on_one_host

TWO_BY_TWO, ONE_AND_THREE, SCATTERED = (0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 0, 1)


def whole_suite(group: dist.ProcessGroup, library: str, hosts: tuple[int, ...], seed: int) -> dict[str, str]:
    options = loopback(library, disorder=seed, strict_memory=seed != 0)
    factory = partial(from_process_group, options, hosts)
    return run_cases(group, factory) | run_sequences(group, factory)


def normal_suite(group: dist.ProcessGroup, hosts: tuple[int, ...], seed: int) -> dict[str, str]:
    options = loopback("system", disorder=seed, strict_memory=seed != 0)

    def factory(spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
        normal = from_process_group(options, hosts, spec, group).normal
        assert normal is not None
        return normal

    return run_cases(group, factory) | run_sequences(group, factory)


@pytest.mark.parametrize(
    ("hosts", "seed"),
    [
        pytest.param(TWO_BY_TWO, 0, id="two_by_two"),
        pytest.param(SCATTERED, 5, marks=pytest.mark.slow, id="scattered"),
    ],
)
def test_many_rows(hosts: tuple[int, ...], seed: int) -> None:
    """Rows lie once on the host of their source, and once on each other host."""
    needs("system")
    by_rank = run_group(normal_suite, len(hosts), args=(hosts, seed), timeout=200)
    found = failures(by_rank, without=f"-{View.INDEX.value}")
    assert not found, found


@pytest.mark.parametrize(
    ("hosts", "library", "seed"),
    [
        (TWO_BY_TWO, "system", 0),
        pytest.param(ONE_AND_THREE, "system", 0, marks=pytest.mark.slow),
        pytest.param(ONE_AND_THREE, "wheel", 0, marks=pytest.mark.slow),
        pytest.param(SCATTERED, "system", 0, marks=pytest.mark.slow),
        pytest.param((3, 3, 3), "system", 0, marks=pytest.mark.slow),
        pytest.param(ONE_AND_THREE, "system", 5, marks=pytest.mark.slow),
        pytest.param(TWO_BY_TWO, "system", 6, marks=pytest.mark.slow),
    ],
)
def test_every_case_gives_the_bits_of_paper_arithmetic(
    hosts: tuple[int, ...], library: str, seed: int
) -> None:
    needs(library)
    by_rank = run_group(whole_suite, len(hosts), args=(library, hosts, seed), timeout=200)
    failures = [
        f"rank {rank}, {name}: {text}"
        for rank, results in enumerate(by_rank)
        for name, text in results.items()
        if text
    ]
    assert len(by_rank[0]) > 400
    assert not failures, "\n".join(failures[:5])


def test_mixed_group_and_one_host_agree_at_model_sizes() -> None:
    needs("system")
    mixed = partial(from_process_group, loopback(), TWO_BY_TWO)
    run_group(run_side_by_side, 4, args=(on_one_host, mixed))


# -- what crosses the network ------------------------------------------------------------------------------

TOKENS, HIDDEN = 8, 256
ROW = 2 * HIDDEN
ROUTING = TOKENS * 4 * (4 + 4)  # ids and weights of all tokens


def counted(exchange: HostExchange, choices: list[int]) -> tuple[int, int]:
    """Bytes that dispatch and combine wrote into the memory of other ranks, each token routed alike."""
    before = exchange.statistics()["counters"]
    x = torch.full((TOKENS, HIDDEN), float(exchange.spec.rank + 1), dtype=torch.bfloat16)
    ids = torch.tensor([choices]).repeat(TOKENS, 1)
    received = exchange.dispatch_send(x, ids, torch.ones(TOKENS, 4)).recv()
    result = exchange.combine_send(received.rows, received).recv()
    assert torch.equal(result, x * sum(choice >= 0 for choice in choices))
    after = exchange.statistics()["counters"]
    return tuple(after[f"bytes/{op}"] - before[f"bytes/{op}"] for op in ("dispatch", "combine"))  # type: ignore[return-value]


def all_routings(exchange: HostExchange) -> list[tuple[int, int]]:
    host = exchange.group.link.hosts[exchange.spec.rank]
    far, mate = 2 * (1 - host), exchange.spec.rank ^ 1
    routings = [[far, far + 1, -1, -1], [far, -1, -1, -1], [mate, -1, -1, -1], [0, 1, 2, 3], [-1] * 4]
    return [counted(exchange, choices) for choices in routings]


def test_a_token_crosses_the_network_once_per_host(tmp_path: Path) -> None:
    needs("system")
    spec = {"placement": (0, 1, 2, 3), "max_tokens": TOKENS, "hidden": HIDDEN, "top_k": 4}
    with mixed_ends(tmp_path, TWO_BY_TWO, spec, loopback()) as ends:
        by_rank = run_ranks(all_routings, 4, spec, ends=ends)
    rows, one = TOKENS * ROW, 2 * ROUTING  # routing goes to the mate and to one rank of the other host
    expected = [
        (one + rows, 2 * rows),  # both ranks of the other host: one row there, an answer from each
        (one + rows, rows),
        (one + rows, rows),
        (one + 2 * rows, 3 * rows),  # everywhere: one row to the mate, one to the other host
        (one, 0),
    ]
    for made in by_rank:
        # Answers are counted where they are sent: as many as a rank receives tokens for.
        assert [dispatched for dispatched, _ in made] == [dispatched for dispatched, _ in expected]
    for turn, (_, answers) in enumerate(expected):
        assert sum(made[turn][1] for made in by_rank) == 4 * answers


def through_the_nic(exchange: HostExchange) -> dict[str, int]:
    """What one operation added to the counters of the network."""
    before = exchange.statistics()["counters"]
    counted(exchange, [2 * (1 - exchange.group.link.hosts[exchange.spec.rank]), -1, -1, -1])
    exchange.barrier()  # the others have what this rank sends
    after = exchange.statistics()["counters"]
    network = [name for name in after if name.startswith("network_")]
    return {name: after[name] - before[name] for name in network}


def test_bytes_are_counted_per_peer_and_domain(tmp_path: Path) -> None:
    needs("system")
    spec = {"placement": (0, 1, 2, 3), "max_tokens": TOKENS, "hidden": HIDDEN, "top_k": 4}
    with mixed_ends(tmp_path, TWO_BY_TWO, spec, loopback()) as ends:
        by_rank = run_ranks(through_the_nic, 4, spec, ends=ends)
    for rank, added in enumerate(by_rank):
        others = (2, 3) if rank < 2 else (0, 1)
        assert {f"network_bytes/{peer}/lo" for peer in others} == {n for n in added if "bytes" in n}
    crossed = sum(n for added in by_rank for name, n in added.items() if "bytes" in name)
    rows = 4 * (ROUTING + 2 * TOKENS * ROW)  # one row to the other host, one answer, and the routing
    assert rows <= crossed <= rows + 8192  # the rest: records, consumed epochs, heartbeats


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    needs("system")
    if why := namespaces.missing():
        pytest.skip(why)
    with Hosts(2) as made:
        yield made


def transmitted() -> int:
    """Bytes that ever left the network namespace of this process."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith(f"{namespaces.DEVICE}:"))
    return int(line.partition(":")[2].split()[8])


def sent_by(exchange: HostExchange, far: list[int]) -> int:
    """Bytes that left this network namespace in eight dispatches of tokens for experts of the other one."""
    x = torch.randn(256, 1024).bfloat16()
    first = exchange.group.link.hosts.index(1 - exchange.group.link.hosts[exchange.spec.rank])
    ids = torch.tensor([[first + rank if rank in far else -1 for rank in range(2)]]).repeat(256, 1)
    exchange.barrier()
    before = transmitted()
    exchange.barrier()  # nobody sends before all have read
    for _ in range(8):
        exchange.dispatch_send(x, ids, torch.ones(256, 2)).recv(View.COMPACT)
    exchange.barrier()
    return transmitted() - before


def sent_for_one_and_two(exchange: HostExchange) -> tuple[int, int]:
    return sent_by(exchange, [0]), sent_by(exchange, [0, 1])


def test_the_wire_between_hosts_carries_one_copy_for_two_ranks(hosts: Hosts, tmp_path: Path) -> None:
    spec = {"placement": (0, 1, 2, 3), "max_tokens": 256, "hidden": 1024, "top_k": 2}
    options = FabricOptions(domain=namespaces.DEVICE)
    with mixed_ends(tmp_path, TWO_BY_TWO, spec, options, tuple(hosts.names)) as ends:
        by_rank = run_ranks(sent_for_one_and_two, 4, spec, ends=ends)
    both_ranks = 2 * 8 * 256 * 2 * 1024  # of a host, eight dispatches each
    for one, two in by_rank:
        assert both_ranks < one < 1.2 * both_ranks
        assert two < 1.1 * one


@pytest.mark.slow
def test_micro_batches_interleave_between_two_hosts_of_two_ranks(hosts: Hosts, tmp_path: Path) -> None:
    options = FabricOptions(domain=namespaces.DEVICE)
    with mixed_ends(tmp_path, TWO_BY_TWO, spec_of(4), options, tuple(hosts.names)) as ends:
        run_ranks(programs.back_to_back, 4, spec_of(4), args=(20,), ends=ends)


def fewest_writes(exchange: HostExchange) -> int:
    """Of one operation among many: with others heartbeats or epochs that waited too long come along."""
    made = []
    for step in range(300):
        before = exchange.group.link.writes
        operation(exchange, step)
        made.append(exchange.group.link.writes - before)
    return min(made)


def test_an_operation_is_three_writes(tmp_path: Path) -> None:
    """Rows; routing, with what was read; rows with the answers."""
    needs("system")
    spec = spec_of(2, num_banks=4)
    with mixed_ends(tmp_path, (0, 1), spec, loopback()) as ends:
        assert run_ranks(fewest_writes, 2, spec, ends=ends) == [3, 3]


# -- order, sleep ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "seed"),
    [
        ("interleaved", 0),
        ("back_to_back", 7),
        pytest.param("back_to_back", 0, marks=pytest.mark.slow),
        pytest.param("interleaved", 7, marks=pytest.mark.slow),
    ],
)
def test_banks_are_reused_safely_when_ranks_run_ahead(program: str, seed: int, tmp_path: Path) -> None:
    needs("system")
    options = loopback(disorder=seed, strict_memory=seed != 0)
    with mixed_ends(tmp_path, ONE_AND_THREE, spec_of(4), options) as ends:
        run_ranks(getattr(programs, program), 4, spec_of(4), args=(40,), ends=ends)


def far_on(exchange: HostExchange) -> None:
    """A reset brings epochs behind those of all votes: further than an immediate has bits for."""
    for _ in range(66_000):
        exchange.all_gather(b"")
    exchange.group.reset()
    for step in range(12):
        operation(exchange, step)


@pytest.mark.slow
def test_epochs_go_beyond_the_bits_of_an_immediate(tmp_path: Path) -> None:
    needs("system")
    with mixed_ends(tmp_path, ONE_AND_THREE, spec_of(4), loopback()) as ends:
        run_ranks(far_on, 4, spec_of(4), 120, ends=ends)


def idles_behind(exchange: HostExchange, peer: Peer) -> float:
    """Rank 0 sends late; all others sleep on what one of them takes in for the rest."""
    operation(exchange, 0)
    if exchange.spec.rank == 0:
        peer.hear()
    begin = sum(os.times()[:2])
    operation(exchange, 1)
    return sum(os.times()[:2]) - begin


def test_ranks_behind_a_gateway_sleep_until_it_rings(tmp_path: Path) -> None:
    needs("system")
    with (
        mixed_ends(tmp_path, ONE_AND_THREE, spec_of(4), loopback()) as ends,
        Ranks(idles_behind, 4, spec_of(4), ends=ends) as ranks,
    ):
        time.sleep(1.5)  # how long they wait
        ranks.tell(0, "go on")
        outcomes = ranks.join(30)
    assert [o.error for o in outcomes] == [None] * 4
    assert max(o.value for o in outcomes[1:]) < 0.2


# -- what a host shares ------------------------------------------------------------------------------------

SPEC = ExchangeSpec(0, 2, (0, 1), max_tokens=4, hidden=64, top_k=2)


@pytest.mark.parametrize(
    ("hosts", "host", "said"),
    [((0,), 0, "one number per rank: 2"), ((0, 1), 2, "host = 2"), ((0, -1), 0, "from 0 to 65535")],
)
def test_hosts_that_do_not_fit_the_group_are_refused(hosts: tuple[int, ...], host: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create_host_share(SPEC, hosts, host)


def test_too_little_memory_is_said_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ep_server.exchange.segment.available_memory", lambda: 1 << 17)
    too_little = r"the exchange of 2 ranks of host 5 needs .* MiB .* 0\.1 MiB are available"
    with pytest.raises(StartupError, match=too_little):
        create_host_share(SPEC, (5, 5), 5)


def test_a_share_of_another_group_is_refused() -> None:
    needs("system")
    share = create_host_share(SPEC, (0, 0), 0)
    whole = create_segment(SPEC)
    wrong = {
        "hosts": HostShare((0, 1), share.fd, share.bells),
        "bells": HostShare((0, 0), share.fd, share.bells[:1]),
        "memory": HostShare((0, 0), whole, share.bells),
        "number": HostShare((0, 0), share.bells[0], share.bells),
    }
    for name, one in wrong.items():
        with pytest.raises(StartupError, match="cannot use what its host shares"):
            FabricLink(SPEC, loopback(), share=one)
        assert name
    with pytest.raises(ConfigError, match="hosts"):
        FabricLink(SPEC, loopback(), share=HostShare((0,), share.fd, share.bells))
    alone = create_host_share(SPEC, (0, 1), 0)
    with pytest.raises(StartupError, match="regions"):  # it has one, for one host's ranks
        open_shm(SPEC, alone.fd)
    os.close(whole)
    share.close()
    alone.close()


def test_regions_are_whole_rows_apart_and_hold_an_inbox() -> None:
    needs("system")
    for hidden in (7, 64, 2047):
        spec = ExchangeSpec(0, 3, (0, 1, 2), max_tokens=3, hidden=hidden, top_k=2)
        share = create_host_share(spec, (0, 0, 0), 0)
        first, second, third = _C.Segment(share.fd).regions
        share.close()
        layout = _C.Layout(geometry_of(spec))
        assert third - second == second - first > layout.total
        assert (second - first) % layout.row_pitch == 0
