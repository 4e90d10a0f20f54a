"""What `ep-server bench` prints for people, read back: figures worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from ep_server.cli.bench import report
from ep_server.cli.bench.breakdown import Steps
from ep_server.cli.bench.load import OK, Trace
from ep_server.cli.bench.summary import Slo, summarise
from ep_server.models.families.spec import RouterSpec
from ep_server.ranks.sizing import distinct_experts

ROUTER = RouterSpec(16, 4)
PHASES = {
    "attention": 0.002, "router": 0.0005, "dispatch": 0.0005, "experts": 0.004, "combine": 0.0005,
    "sample": 0.0005, "rest": 0.0015, "idle": 0.0005,
}  # fmt: skip
# Two ranks, of which the first had three times the rows of the other.
STEPS = Steps(
    7, 0.010, PHASES, tokens=6.0, active=(7.0, 5.0), load=(300, 100), sent={}, overlapped=0.25, device=0.0095
)


def printed(*arguments: object, by: str) -> list[str]:
    out = StringIO()
    getattr(report, by)(Console(file=out, width=140), *arguments)
    return [" ".join(re.split(r"[\s│┃]+", line)).strip() for line in out.getvalue().splitlines()]


def test_phases_stand_beside_their_bounds() -> None:
    lines = printed(STEPS, {"attention": 0.001, "experts": 0.003}, "a step", by="print_step")
    for line in (
        "phase ms share bound, ms of its bound",
        "attention 2.000 20.0% 1.000 2.00 x",
        "experts 4.000 40.0% 3.000 1.33 x",
        "combine 0.500 5.0% - -",
        "all steps minus the timed ones 1.500 15.0% - -",
        "idle: waits for the host 0.500 5.0% - -",
        "all 10.000 4.000 2.50 x",
    ):
        assert line in lines


def test_a_moe_layer_stands_beside_its_bytes() -> None:
    told = report.moe_line(STEPS, {"attention": 0.001, "router": 0.001, "experts": 0.003}, 5)
    assert told == ("MoE layer, router to residual: 1100.0 us; its bytes alone take 800.0 us (1.37 x)")
    assert report.moe_line(STEPS, {}, 5) == "MoE layer, router to residual: 1100.0 us"


def test_without_bounds_there_are_no_columns_for_them() -> None:
    lines = printed(replace(STEPS, device=None), {}, "a step", by="print_step")
    assert "attention 2.000 20.0%" in lines and "outside the phases 1.500 15.0%" in lines


def test_the_hosts_share_and_overlap() -> None:
    told = report.overlap_line(STEPS, "auto")
    assert told.startswith(
        "two micro-batches in 25.0% of the steps (overlap auto); host share of a step 5.0%"
    )


@pytest.mark.parametrize(("uniform", "drawn"), [(True, "uniform draws give"), (False, "the router chose")])
def test_distinct_experts_and_the_fullest_rank(uniform: bool, drawn: str) -> None:
    told, expected = report.experts_line(STEPS, ROUTER, uniform=uniform), distinct_experts(16, 4, 6.0)
    assert told.startswith("distinct experts per layer and step: 12.0 of 16 for 6.0 tokens; " + drawn)
    assert f"{expected:.1f} (" in told and f"{12 / expected:.1%}" in told
    assert told.endswith("Rows of the fullest rank: 1.500 x the mean")


def test_fewer_experts_than_uniform_draws_reach_stand_out() -> None:
    """Then fewer weights were read than a benchmark should read."""
    few = replace(STEPS, active=(5.0, 4.0))
    assert "[red]" in report.experts_line(few, ROUTER, uniform=True)
    assert "[red]" not in report.experts_line(few, ROUTER, uniform=False)
    assert "[red]" not in report.experts_line(STEPS, replace(ROUTER, top_k=3), uniform=True)


def test_what_callers_saw() -> None:
    """Two of three requests in time: 20 ms to the first token, then 10 ms each; one failed."""
    traces = []
    for index in range(3):
        trace = Trace(index, 4, 0.0, sent=0.001)
        trace.arrivals = [(0.02 + 0.01 * n, 1) for n in range(4)]
        trace.end(OK if index else "UNAVAILABLE", 0.05, "" if index else "no [room]")
        traces.append(trace)
    found = summarise(traces, 3, Slo(0.02, 0.01 + 1e-9))
    lines = printed(found, "callers", by="print_latencies")
    assert "time to first token 20.00 20.00 20.00 20.00 20.00" in lines
    assert "mean gap of a request 10.00 10.00 10.00 10.00 10.00" in lines
    rates = "240.0 tokens/s, 300.0 tokens/s while all 3 streams ran (0.03 s), 40.00 requests/s"
    assert any(line.startswith(rates) for line in lines)
    goodput = "goodput (first token <= 20 ms and mean gap <= 10 ms): 40.00 requests/s, 160.0 tokens/s, 66.7%"
    assert any(line.startswith(goodput) for line in lines)
    assert "1 failed with UNAVAILABLE, the first: no [room]" in lines
    apart = printed(summarise([traces[0], Trace(1, 4, 0.0)], 2), "callers", by="print_latencies")
    assert any(line.startswith("80.0 tokens/s, 2 streams never ran at the same time, ") for line in apart)
    open_loop = printed(summarise(traces, 0), "callers", by="print_latencies")
    assert any(line.startswith("240.0 tokens/s, 40.00 requests/s") for line in open_loop)
