"""Runs the kernels of csrc/exchange/nvlink on the CPU, with the programs of test_cuda.py.

Bit for bit against the same oracles, with real processes. Needs x86-64 and a compiler.
The emulation: tests/support/exchange/emulated.
"""

from __future__ import annotations

import platform
from functools import partial
from typing import Any

import pytest

from ep_server.compat import deep_ep
from tests.support.exchange import emulated
from tests.support.exchange.buffer_masks import LOSSES, Lost
from tests.support.exchange.emulated import programs
from tests.support.exchange.emulated.built import SECONDS, module
from tests.support.exchange.killed_rank import DEATHS, check_grown, check_killed, check_replaced
from tests.support.exchange.process_group import run_group

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="its fibers are switched by x86-64 code"
)
HOT = [  # of `make test`
    ("gpu_odd_inputs.an_expert_twice", 3),
    ("gpu_odd_inputs.not_finite", 2),
    ("gpu_faults.failures", 3),
    ("gpu_faults.stale_handles", 2),
    ("gpu_normed.widths", 2),
    ("gpu_normed.many_tokens", 2),
    ("gpu_normed.odd_rows", 2),
    ("gpu_normed.refused", 1),
    ("gpu_normed.without_one", 3),
    ("gpu_normed.failed", 3),
    ("gpu_delay.not_before", 2, False),
    ("gpu_delay.same_results", 2, True),
    ("gpu_delay.aborted", 2),
    ("gpu_delay.two_halves", 2),
    ("gpu_delay.refused", 2),
]
SECOND = 1_000_000_000
SIZES = ("hidden_640", "six_rows", "sixteen_banks", "sixteen_choices", "experts_not_divisible", "one_sm")
MORE = [
    *[("gpu_faults.masking", n, by_hand) for n in (2, 4) for by_hand in (False, True)],
    *[
        (f"gpu_faults.{fault}", n, op)
        for fault in ("delayed", "dropped")
        for n in (2, 3)
        for op in ("dispatch", "combine")
    ],
    ("gpu_faults.masking", 8, False),
    *[("gpu_normed.widths", n) for n in (1, 4)],
    *[(f"gpu_normed.{name}", n) for name in ("without_one", "failed") for n in (2, 8)],
    *[("gpu_wires.late_weights", n) for n in (1, 2, 4, 8)],
    *[("gpu_wires.low_precision", n, wire) for n in (1, 2, 4) for wire in ("log10", "fp8")],
    *[
        (f"gpu_streams.{name}", 2) for name in ("orders_of_receives", "freed_handles")
    ],  # all in one stream here
    *[(f"gpu_programs.{name}", 2) for name in ("side_by_side", "measurements", "refused")],
    *[("gpu_delay.not_before", n, True) for n in (2, 4)],
    *[("gpu_delay.without_one", n) for n in (2, 3)],
    *[("gpu_delay.same_results", n, False) for n in (1, 3)],
]


def run(name: str, num_ranks: int, *args: Any) -> list[Any]:
    path = module()
    return run_group(programs.on_emulation, num_ranks, args=(path, name, *args), timeout=SECONDS)


def failures(by_rank: list[dict[str, str]]) -> list[str]:
    assert all(by_rank) and all(set(each) == set(by_rank[0]) for each in by_rank)
    return [
        f"rank {rank}, {name}: {text}"
        for rank, all in enumerate(by_rank)
        for name, text in all.items()
        if text
    ]


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("program", ["conformance_apart", "fused_conformance"])
@pytest.mark.parametrize(
    "num_ranks", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_conformance(num_ranks: int, program: str) -> None:
    found = failures(run(f"gpu_programs.{program}", num_ranks))
    assert not found, "\n".join(found[:5])


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_many_rows(num_ranks: int) -> None:
    """DeepEP's high-throughput calls."""
    found = failures(run("normal_programs.run_programs", num_ranks, "cuda"))
    assert not found, "\n".join(found[:5])


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize(
    ("num_ranks", "blocks"), [(2, 1), (2, 7), *(pytest.param(4, n, marks=pytest.mark.slow) for n in (1, 7))]
)
def test_many_rows_in_one_block_and_in_odd_numbers_of_them(num_ranks: int, blocks: int) -> None:
    """A single block both returns rows and sums; of seven, three return."""
    args = (module(), blocks, "normal_programs.run_programs", "cuda")
    found = failures(run_group(programs.with_multiprocessors, num_ranks, args=args, timeout=SECONDS))
    assert not found, "\n".join(found[:5])


@pytest.mark.timeout(SECONDS + 120)
def test_many_rows_between_hosts() -> None:
    """DeepEP's high-throughput calls over two hosts of two ranks."""
    args = ("normal_programs.run_programs", 4, "cuda", deep_ep.Network((0, 0, 1, 1)))
    found = failures(run(*args))
    assert not found, "\n".join(found[:5])


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_rank_that_does_not_call(call: str) -> None:
    run("normal_losses.stays_away", 2, "cuda", call)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sizes(num_ranks: int) -> None:
    """Those that are not large: one kernel at a time fills two multiprocessors here."""
    found = failures(run("gpu_programs.run_sizes", num_ranks, SIZES))
    assert not found, "\n".join(found[:5])


@pytest.mark.slow
def test_as_many_ranks_as_a_host_may_have() -> None:
    found = failures(run("gpu_programs.run_sizes", 8, ("hidden_640", "sixteen_choices")))
    assert not found, "\n".join(found[:5])


def test_blocks_for_fewer_tokens_than_come() -> None:
    found = failures(run("gpu_programs.run_sizes", 3, ("blocks_for_few", "blocks_for_few_fp8")))
    assert not found, "\n".join(found[:5])


@pytest.mark.parametrize("program", HOT, ids=lambda p: f"{p[0]}-{p[1]}")
def test_program(program: tuple[Any, ...]) -> None:
    run(*program)


@pytest.mark.parametrize(
    ("num_ranks", "rounds"),
    [(2, 8), pytest.param(2, 40, marks=pytest.mark.slow), pytest.param(3, 40, marks=pytest.mark.slow)],
)
def test_a_rank_is_masked_in_the_middle_of_operations(num_ranks: int, rounds: int) -> None:
    args = (module(), 4000, "gpu_faults.masked_in_the_middle", rounds, 0.1)
    run_group(programs.with_late_blocks, num_ranks, args=args, timeout=SECONDS)


@pytest.mark.parametrize("program", ["outlived", "dropped"])
def test_a_gpu_that_hangs(program: str) -> None:
    """Copies of the exchange's state, and its end, have deadlines."""
    run(f"gpu_hangs.{program}", 1, partial(emulated.hangs, module()))


def test_a_delay_counts_from_the_send_by_any_clock() -> None:
    apart = 1000 * SECOND
    args = (module(), apart, "gpu_delay.not_before", True)
    by_rank = run_group(programs.with_clocks_apart, 2, args=args, timeout=SECONDS)
    for rank, ahead in enumerate(by_rank):
        assert [round(ns / apart) for ns in ahead] == [peer - rank for peer in range(2)], by_rank


@pytest.mark.slow
@pytest.mark.parametrize("program", MORE, ids=lambda p: "-".join(map(str, p)))
def test_more_programs(program: tuple[Any, ...]) -> None:
    run(*program)


def test_programs_in_deepeps_form() -> None:
    found = failures(run("buffer_programs.run_programs", 2, "cuda"))
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["order_of_sends", "hooks_keep_their_stream", "log_format", "wrong_ids"])
def test_more_programs_in_deepeps_form(program: str) -> None:
    run(f"gpu_buffer_programs.{program}", 3)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("program", ["masks", "masks_of_all_sizes"])
def test_masks_on_request(num_ranks: int, program: str) -> None:
    run(f"buffer_masks.{program}", num_ranks, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("shrink", [True, False])
def test_a_rank_that_stays_away(shrink: bool) -> None:
    run("buffer_masks.a_rank_that_stays_away", 3, "cuda", shrink)


@pytest.mark.parametrize(
    ("num_ranks", "losses"),
    [
        pytest.param(n, each, marks=[] if n == 4 else pytest.mark.slow)
        for n, all in LOSSES.items()
        for each in all
    ],
)
def test_ranks_are_lost_one_after_the_other(num_ranks: int, losses: Lost) -> None:
    run("buffer_masks.shrink", num_ranks, "cuda", False, losses)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
@pytest.mark.parametrize("death", DEATHS)
def test_a_killed_rank_is_reported_and_left_behind(num_ranks: int, on_timeout: str, death: str) -> None:
    check_killed(programs.one_dies, num_ranks, death, on_timeout, (module(),))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_rank_is_replaced(num_ranks: int) -> None:
    check_replaced(programs.one_is_replaced, num_ranks, module(), num_ranks)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_comes_later_and_leaves(num_ranks: int) -> None:
    check_grown(programs.one_comes_and_leaves, num_ranks, module(), num_ranks)


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 8))])
def test_many_rows_of_steps(num_ranks: int) -> None:
    found = failures(run("gpu_many.cases", num_ranks))
    assert not found, "\n".join(found[:5])


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize(
    ("hosts", "shapes"),
    [
        ((0, 0, 1), [("odd",)]),
        *(pytest.param(hosts, [], marks=pytest.mark.slow) for hosts in ((0, 0, 1), (0, 0, 1, 1))),
    ],
)
def test_many_rows_of_several_hosts(hosts: tuple[int, ...], shapes: list[tuple[str, ...]]) -> None:
    """A host of one rank has no operations for many rows: it uses its only ones."""
    found = failures(run("gpu_two_parts.cases", len(hosts), hosts, *shapes))
    assert not found, "\n".join(found[:5])


@pytest.mark.parametrize("program", ["turns", "refused", "measurements"])
def test_many_and_few_rows(program: str) -> None:
    run(f"gpu_many.{program}", 2)


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_rank_lost_with_many_rows(call: str) -> None:
    run("gpu_many.lost", 3, call)
