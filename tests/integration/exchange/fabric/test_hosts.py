"""The exchange between hosts: network namespaces that share nothing but a network."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ep_server.errors import PeerLost, PeerTimeout
from ep_server.testing import namespaces
from ep_server.testing.namespaces import Hosts
from tests.support.exchange import fault_programs as programs
from tests.support.exchange.fault_programs import spec_of
from tests.support.exchange.ranks import Ranks, run_ranks
from tests.support.fabric.fabric_ends import needs
from tests.support.fabric.fault_programs import assert_only, goes_on, one_each, patiently


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    needs("system")
    if why := namespaces.missing():
        pytest.skip(why)
    with Hosts(request.param) as made:
        yield made


@pytest.mark.parametrize(
    ("library", "hosts"),
    [
        ("system", 4),
        ("wheel", 2),
        pytest.param("system", 2, marks=pytest.mark.slow),
        pytest.param("wheel", 4, marks=pytest.mark.slow),
    ],
    indirect=["hosts"],
)
def test_micro_batches_interleave_between_hosts(hosts: Hosts, library: str, tmp_path: Path) -> None:
    needs(library)
    ranks = len(hosts.names)
    ends = one_each(hosts, tmp_path, library)
    run_ranks(programs.back_to_back, ranks, spec_of(ranks), 60, args=(20,), ends=ends)


@pytest.mark.parametrize("hosts", [3], indirect=True)
@pytest.mark.parametrize("library", ["system", pytest.param("wheel", marks=pytest.mark.slow)])
def test_a_host_behind_a_slow_line_only_delays(hosts: Hosts, library: str, tmp_path: Path) -> None:
    needs(library)
    try:
        hosts.limit(1, "2mbit")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no line can be made slow here (sch_tbf): {error.stderr.strip()}")
    run_ranks(programs.back_to_back, 3, spec_of(3), 60, args=(20,), ends=one_each(hosts, tmp_path, library))


@pytest.mark.parametrize("hosts", [3], indirect=True)
@pytest.mark.parametrize("library", ["system", "wheel"])
def test_disconnected_host_is_named_by_the_others_and_gives_up(
    hosts: Hosts, library: str, tmp_path: Path
) -> None:
    needs(library)

    def attempt(folder: Path, timeout_ns: int) -> None:
        hosts.mend(1)
        with Ranks(goes_on, 3, spec_of(3, timeout_ns), ends=one_each(hosts, folder, library)) as ranks:
            for rank in range(3):
                assert ranks.message(rank, 30) == "started"
            hosts.cut(1)
            ended = ranks.join(30)
        assert_only([1], [ended[0], ended[2]])
        assert_only([0, 2], [ended[1]])
        for outcome in ended:
            assert isinstance(outcome.error, PeerTimeout | PeerLost), outcome

    patiently(attempt, tmp_path)
