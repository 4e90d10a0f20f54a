"""DeepEP's high-throughput calls on CPU tensors, against plain torch (tests/support/exchange/normal_*.py)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

from ep_server.compat import deep_ep
from ep_server.errors import InvalidArgument
from tests.support.exchange import normal_losses, normal_programs
from tests.support.exchange.normal_programs import NormalUser
from tests.support.exchange.process_group import run_group
from tests.support.fabric.fabric_ends import loopback, needs


@cache
def results(num_ranks: int, hosts: tuple[int, ...] = ()) -> dict[str, list[str]]:
    """program -> failure texts of the ranks that failed; one group of processes for all."""
    network = deep_ep.Network(hosts, loopback()) if hosts else None
    by_rank = run_group(normal_programs.run_programs, num_ranks, args=("cpu", network), timeout=200)
    return {
        name: [f"rank {rank}: {answers[name]}" for rank, answers in enumerate(by_rank) if answers[name]]
        for name in by_rank[0]
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("program", normal_programs.PROGRAMS)
def test_program(num_ranks: int, program: str) -> None:
    failures = results(num_ranks)[program]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("hosts", [(0, 1), pytest.param((0, 0, 1, 1), marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", normal_programs.PROGRAMS)
def test_ranks_of_several_hosts(hosts: tuple[int, ...], program: str) -> None:
    needs("system")
    failures = results(len(hosts), hosts)[program]
    assert not failures, "\n".join(failures)


def other_hosts_on_one_rank(group: dist.ProcessGroup) -> None:
    """And a network that cannot be opened: nothing stays behind."""
    user = NormalUser(group, network=deep_ep.Network((0, group.rank())))
    mine = user.everyone("uniform", 1)[user.rank]
    with pytest.raises(InvalidArgument, match="the same on all ranks") as caught:
        user.buffer.dispatch(user.rows(mine, "bf16"), **user.layout(mine))
    assert caught.value.field == "hosts"
    network, left = deep_ep.Network((0, 1), loopback(queue_depth=4)), list[int]()
    user = NormalUser(group, network=network)
    for _ in range(3):
        with pytest.raises(InvalidArgument) as caught:
            user.buffer.dispatch(user.rows(mine, "bf16"), **user.layout(mine))
        assert caught.value.field == "queue_depth"
        left.append(len(list(Path("/proc/self/fd").iterdir())))
    assert left[1] == left[2], left


def test_ranks_that_disagree_are_told_so() -> None:
    needs("system")
    run_group(other_hosts_on_one_rank, 2)


def wrong_hosts(group: dist.ProcessGroup) -> None:
    many = "one number per rank: 2"
    for hosts, said in {(0, 0, 0): many, (0, 1, 1): many, (0, 70_000): "65535"}.items():
        user = NormalUser(group, network=deep_ep.Network(hosts))
        mine = user.everyone("uniform", 1)[user.rank]
        with pytest.raises(InvalidArgument, match=said) as caught:
            user.buffer.dispatch(user.rows(mine, "bf16"), **user.layout(mine))
        assert caught.value.field == "hosts"
        user.buffer.destroy()


def test_hosts_that_cannot_be_are_refused_by_name() -> None:
    run_group(wrong_hosts, 2)


@pytest.mark.parametrize("hosts", [(), (0, 1)])
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_rank_that_does_not_call(call: str, hosts: tuple[int, ...]) -> None:
    network = deep_ep.Network(hosts, loopback()) if hosts else None
    run_group(normal_losses.stays_away, 2, args=("cpu", call, network))
