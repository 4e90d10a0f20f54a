"""Many starts, many ends: nothing is left behind, and a random moment to die is as good as any other."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ep_server.ep.fabric import FabricExchange
from ep_server.ep.fabric_bootstrap import from_store
from tests.ep.test_faults import SECOND, operation, spec_of
from tests.fabric.fabric_ends import ends, loopback, needs
from tests.fabric.test_faults import assert_lost
from tests.harness.ranks import Peer, Ranks, run_ranks

RANKS = 16


def begins(exchange: FabricExchange) -> None:
    """One operation with a token for every rank."""
    ranks = exchange.spec.num_ranks
    x = torch.full((1, 64), float(exchange.spec.rank), dtype=torch.bfloat16)
    ids = torch.arange(ranks)[None]
    received = exchange.dispatch_send(x, ids, torch.ones(1, ranks)).recv()
    assert received.rows[:, 0].tolist() == list(range(ranks))
    assert (exchange.combine_send(received.rows, received).recv() == x * ranks).all()


def cold_start(folder: Path) -> None:
    spec = {"placement": tuple(range(RANKS)), "max_tokens": 1, "hidden": 64, "top_k": RANKS}
    folder.mkdir()
    run_ranks(begins, RANKS, spec, 60, ends=ends(folder, RANKS, loopback()))


def test_sixteen_ranks_start_at_once(tmp_path: Path) -> None:
    needs("system")
    cold_start(tmp_path / "once")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_cold_starts_of_sixteen_ranks(tmp_path: Path) -> None:
    needs("system")
    for turn in range(100):
        cold_start(tmp_path / str(turn))


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def cycles(exchange: FabricExchange, folder: str, library: str, turns: int) -> tuple[object, object]:
    """Makes, uses and closes groups of the same ranks; what is held after the first and after the last."""
    first: object = None
    for turn in range(turns):
        store = dist.FileStore(f"{folder}/{turn}", exchange.spec.num_ranks)
        one = from_store(store, "group", exchange.spec, loopback(library))
        operation(one, turn)
        one.close()
        del one, store
        first = first or held()
    return first, held()


@pytest.mark.parametrize(
    ("library", "turns"),
    [
        ("system", 20),
        ("wheel", 20),
        pytest.param("system", 1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_nothing_is_left_of_groups_that_were_closed(library: str, turns: int, tmp_path: Path) -> None:
    needs(library)
    args = (str(tmp_path), library, turns)
    made = ends(tmp_path, 2, loopback(library))
    for first, last in run_ranks(cycles, 2, spec_of(2), 600, args=args, ends=made):
        assert first == last


def never_ends(exchange: FabricExchange, peer: Peer) -> None:
    peer.tell("started")
    for step in range(1 << 30):
        operation(exchange, step)


@pytest.mark.parametrize("times", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_rank_killed_at_a_random_moment_is_named_by_every_survivor(times: int, tmp_path: Path) -> None:
    needs("system")
    moments = random.Random(4)
    for turn in range(times):
        folder = tmp_path / str(turn)
        folder.mkdir()
        victim = turn % 3
        with Ranks(never_ends, 3, spec_of(3, SECOND), ends=ends(folder, 3, loopback())) as ranks:
            for rank in range(3):
                assert ranks.message(rank, 30) == "started"
            signal.sigtimedwait([], moments.uniform(0.0, 0.3))  # not a synchronisation: the random moment
            ranks.kill(victim)
            ended = ranks.join(30)
        assert_lost([o for o in ended if o.rank != victim], victim)
