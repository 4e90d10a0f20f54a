"""The conformance suite of the exchange over libfabric: both library versions, every provider that is here.

One group of processes per case runs the whole suite; what failed is listed by name.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.exchange.conformance import run_side_by_side
from tests.support.exchange.process_group import run_group
from tests.support.fabric.fabric_ends import loopback, needs
from tests.support.fabric.suites import make, on_one_host, whole_suite

RXM = "tcp;ofi_rxm"  # another protocol over the same sockets, in both versions


@pytest.mark.parametrize(
    ("library", "provider", "num_ranks"),
    [
        ("system", "", 3),
        ("wheel", "", 2),
        pytest.param("system", "", 4, marks=pytest.mark.slow),
        pytest.param("system", RXM, 3, marks=pytest.mark.slow),
        pytest.param("wheel", "", 3, marks=pytest.mark.slow),
        pytest.param("wheel", RXM, 3, marks=pytest.mark.slow),
    ],
)
def test_every_case_gives_the_bits_of_paper_arithmetic(library: str, provider: str, num_ranks: int) -> None:
    needs(library)
    by_rank = run_group(whole_suite, num_ranks, args=(loopback(library, provider=provider),), timeout=150)
    failures = [
        f"rank {rank}, {name}: {text}"
        for rank, results in enumerate(by_rank)
        for name, text in results.items()
        if text
    ]
    assert len(by_rank[0]) > 400
    assert not failures, "\n".join(failures[:5])


def test_network_and_shared_memory_agree_at_model_sizes() -> None:
    needs("system")
    run_group(run_side_by_side, 2, args=(on_one_host, partial(make, loopback())))
