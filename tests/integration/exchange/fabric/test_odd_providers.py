"""What a provider is asked while ranks connect; providers whose writes fail or that nobody can sleep on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ep_server.errors import StartupError
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.host import HostExchange
from tests.support.exchange import fault_programs as programs
from tests.support.exchange.fault_programs import operation, spec_of
from tests.support.exchange.ranks import Ranks, run_outcomes, run_ranks
from tests.support.fabric.fabric_ends import ends, needs
from tests.support.fabric.wrapped import Wrapped


def odd(folder: Path, library: str = "system", connect_seconds: float = 20.0, **how: Any) -> FabricOptions:
    """A provider on the loopback, wrapped so."""
    needs(library)
    made = Wrapped(library=library, **how).build(folder)
    return FabricOptions(str(made), address="127.0.0.1", connect_seconds=connect_seconds)


def works(exchange: HostExchange) -> None:
    for step in range(3):
        operation(exchange, step)


def test_connections_are_opened_from_the_next_rank_on(tmp_path: Path) -> None:
    ranks = 5
    run_ranks(works, ranks, spec_of(ranks), 30, ends=ends(tmp_path, ranks, odd(tmp_path)))
    first_writes: dict[str, dict[int, None]] = {}  # of each process: its peers in the order of their first
    for line in (tmp_path / "record").read_text(encoding="utf-8").splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "write":
            process, peer = rest.split()
            first_writes.setdefault(process, {})[int(peer)] = None
    orders = sorted(tuple(peers) for peers in first_writes.values())
    assert orders == sorted(tuple((rank + 1 + i) % ranks for i in range(ranks - 1)) for rank in range(ranks))


@pytest.mark.parametrize(
    ("library", "failing"),
    [
        ("system", 1),
        ("wheel", 5),
        pytest.param("system", 5, marks=pytest.mark.slow),
        pytest.param("wheel", 1, marks=pytest.mark.slow),
    ],
)
def test_a_greeting_whose_write_fails_is_sent_again(library: str, failing: int, tmp_path: Path) -> None:
    made = ends(tmp_path, 3, odd(tmp_path, library, failing=failing))
    run_ranks(works, 3, spec_of(3), 30, ends=made)


def test_failing_greetings_end_the_start_with_the_reason(tmp_path: Path) -> None:
    made = ends(tmp_path, 2, odd(tmp_path, failing=100_000, connect_seconds=1.0))
    for outcome in run_outcomes(works, 2, spec_of(2), 30, ends=made):
        assert isinstance(outcome.error, StartupError), outcome
        asked = f"rank {1 - outcome.rank} does not answer; writes fail: Connection refused"
        assert str(outcome.error).endswith(asked), outcome.error


@pytest.mark.parametrize("library", ["system", "wheel"])
def test_a_descriptor_in_error_neither_spins_nor_stops_a_rank(library: str, tmp_path: Path) -> None:
    made = ends(tmp_path, 2, odd(tmp_path, library, broken_wait=True))
    with Ranks(programs.idles, 2, spec_of(2), ends=made) as ranks:
        time.sleep(1.5)  # how long rank 0 waits
        ranks.tell(1, "go on")
        busy = [outcome.value for outcome in ranks.join(30)]
    assert busy[0] < 0.5  # of a core's seconds, not of time that passed
