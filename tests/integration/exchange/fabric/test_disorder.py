"""The exchange on a network as production has it.

TCP delivers in order, asks for no registration and takes any number of immediates: it would hide code that
relies on that. The option `disorder` permutes and delays writes and completions. A wrapped libfabric
addresses memory by virtual address and the provider's key, sends from registered memory only, carries 4 bytes
with a write and wants a receive for each.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from tests.support.exchange import fault_programs as programs
from tests.support.exchange.fault_programs import spec_of
from tests.support.exchange.process_group import run_group
from tests.support.exchange.ranks import run_ranks
from tests.support.fabric.fabric_ends import ends, loopback, needs
from tests.support.fabric.fault_programs import resets
from tests.support.fabric.suites import whole_suite
from tests.support.fabric.wrapped import Wrapped

OWN_KEY = 0x1EB0  # what csrc/exchange/fabric/endpoint.cpp asks for where it may choose


def production(folder: Path, library: str = "system", disorder: int = 0, receives: int = 64) -> FabricOptions:
    """A network with all of that; `receives` of a rank may be waiting for an immediate."""
    needs(library)
    made = Wrapped(library=library, strict=True, most_receives=receives).build(folder)
    return FabricOptions(str(made), address="127.0.0.1", disorder=disorder)


def assert_conforms(options: FabricOptions, num_ranks: int) -> None:
    by_rank = run_group(whole_suite, num_ranks, args=(options,), timeout=200)
    failures = [f"{name}: {text}" for results in by_rank for name, text in results.items() if text]
    assert len(by_rank[0]) > 400
    assert not failures, "\n".join(failures[:5])


@pytest.mark.parametrize(
    ("library", "disorder", "num_ranks"),
    [
        ("system", 1, 2),
        ("wheel", 0, 2),
        *[pytest.param("system", seed, 3, marks=pytest.mark.slow) for seed in (2, 3, 4)],
        *[pytest.param("wheel", seed, 3, marks=pytest.mark.slow) for seed in (0, 5)],
    ],
)
def test_the_conformance_suite_passes_on_a_production_network(
    library: str, disorder: int, num_ranks: int, tmp_path: Path
) -> None:
    assert_conforms(production(tmp_path, library, disorder), num_ranks)


def test_the_wrapped_library_asks_for_what_cards_ask_for(tmp_path: Path) -> None:
    exchange = FabricLink(ExchangeSpec(0, 1, (0, 0), 4, 64, 2), production(tmp_path))
    asked = "local, virtual address, allocated, provider key, a receive per immediate"
    assert f"registration {asked}" in exchange.description
    _, base, key, *_ = exchange.address
    assert base != 0
    assert key != OWN_KEY
    exchange.close()


@pytest.mark.parametrize("program", ["interleaved", "back_to_back"])
@pytest.mark.parametrize("receives", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_banks_are_reused_safely_in_any_order(program: str, receives: int, tmp_path: Path) -> None:
    made = ends(tmp_path, 3, production(tmp_path, disorder=7, receives=receives))
    run_ranks(getattr(programs, program), 3, spec_of(3), 60, args=(40,), ends=made)


@pytest.mark.parametrize("seed", [0, 11])
def test_a_reset_leaves_nothing_of_the_old_generation(seed: int, tmp_path: Path) -> None:
    needs("system")
    made = ends(tmp_path, 3, loopback(disorder=seed))
    assert run_ranks(resets, 3, spec_of(3), 60, args=(20,), ends=made) == [20] * 3
