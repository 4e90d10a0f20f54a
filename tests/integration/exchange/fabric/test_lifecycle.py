"""Many starts, many ends: every one succeeds, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.host import HostExchange
from tests.support.exchange.fault_programs import operation, spec_of
from tests.support.exchange.ranks import run_ranks
from tests.support.fabric.fabric_ends import connected, ends, loopback, needs, through_file

RANKS = 16
SETTLED_TURNS = 100  # by then the pools of library and allocator are as large as they get
MOST_GROWTH_KIB = 2048  # of hundreds of groups: less than a few KiB for each


def begins(exchange: HostExchange) -> None:
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


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_sixteen_ranks_start_at_once(times: int, tmp_path: Path) -> None:
    needs("system")
    for turn in range(times):
        cold_start(tmp_path / str(turn))


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def resident_kib() -> int:
    """Memory of this process, KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS:")))


def cycles(exchange: HostExchange, folder: str, library: str, turns: int) -> list[tuple[object, int]]:
    """Makes, uses and closes groups of the same ranks; what is held after each."""
    after = []
    for turn in range(turns):
        link, spec = FabricLink(exchange.spec, loopback(library)), exchange.spec
        one = connected(link, through_file(f"{folder}/{turn}", spec))
        operation(one, turn)
        one.close()
        del one, link
        after.append((held(), resident_kib()))
    return after


@pytest.mark.parametrize("library", ["system", "wheel"])
@pytest.mark.parametrize(
    "turns", [20, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_nothing_is_left_of_groups_that_were_closed(library: str, turns: int, tmp_path: Path) -> None:
    needs(library)
    args = (str(tmp_path), library, turns)
    made = ends(tmp_path, 2, loopback(library))
    for after in run_ranks(cycles, 2, spec_of(2), 600, args=args, ends=made):
        assert after[0][0] == after[-1][0]
        if turns > SETTLED_TURNS:
            assert after[-1][1] - after[SETTLED_TURNS][1] < MOST_GROWTH_KIB
