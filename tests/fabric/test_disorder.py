"""The exchange on a network as production has it: no order between writes, late completions, strict memory.

TCP delivers in order and asks for no registration; without the shim it would hide code that relies on that.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ep_server.ep.fabric import FabricExchange
from ep_server.errors import GroupAborted
from tests.ep import test_faults as programs
from tests.ep.test_faults import operation, spec_of
from tests.fabric.fabric_ends import ends, loopback, needs
from tests.fabric.test_conformance import whole_suite
from tests.harness.process_group import run_group
from tests.harness.ranks import run_ranks


@pytest.mark.parametrize(
    ("seed", "num_ranks"), [(1, 2), *[pytest.param(s, 3, marks=pytest.mark.slow) for s in (2, 3, 4)]]
)
def test_the_conformance_suite_passes_in_any_order(seed: int, num_ranks: int) -> None:
    needs("system")
    options = loopback(disorder=seed, strict_memory=True)
    by_rank = run_group(whole_suite, num_ranks, args=(options,), timeout=200)
    failures = [f"{name}: {text}" for results in by_rank for name, text in results.items() if text]
    assert len(by_rank[0]) > 400
    assert not failures, "\n".join(failures[:5])


@pytest.mark.parametrize("program", ["interleaved", "back_to_back"])
def test_banks_are_reused_safely_in_any_order(program: str, tmp_path: Path) -> None:
    needs("system")
    made = ends(tmp_path, 3, loopback(disorder=7, strict_memory=True))
    run_ranks(getattr(programs, program), 3, spec_of(3), 60, args=(40,), ends=made)


def resets(exchange: FabricExchange, turns: int) -> int:
    """Operations are under way whenever a rank aborts; those after the reset see only their own rows."""
    for turn in range(turns):
        with pytest.raises(GroupAborted):
            for step in range(1 << 20):
                if step == 3 and exchange.spec.rank == turn % exchange.spec.num_ranks:
                    threading.Thread(target=exchange.abort).start()
                operation(exchange, 10 * turn + step)
        exchange.reset()
    operation(exchange, 0)
    return int(exchange._native.generation)  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", [0, 11])
def test_a_reset_leaves_nothing_of_the_old_generation(seed: int, tmp_path: Path) -> None:
    needs("system")
    made = ends(tmp_path, 3, loopback(disorder=seed))
    assert run_ranks(resets, 3, spec_of(3), 60, args=(20,), ends=made) == [20] * 3
