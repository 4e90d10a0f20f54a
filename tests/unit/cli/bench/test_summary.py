"""Figures of traces against numpy and against traces whose figures are known by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_server.cli.bench.load import INCOMPLETE, OK, Trace
from ep_server.cli.bench.summary import Slo, Steady, quantile, quantiles, steady, summarise

seconds = st.floats(0, 1e6, allow_nan=False)


def trace(
    index: int, planned: float, *arrivals: tuple[float, int], status: str = OK, **fields: float
) -> Trace:
    """Sent when it was planned, ended with its last token, if the fields do not say otherwise."""
    made = Trace(index, sum(count for _, count in arrivals), planned, planned, arrivals=list(arrivals))
    for name, value in fields.items():
        setattr(made, name, value)
    made.end(status, fields.get("ended", arrivals[-1][0] if arrivals else planned))
    return made


@given(st.lists(seconds, min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99, 0.0, 1.0]))
def test_quantiles_are_numpys_nearest_ranks(values: list[float], q: float) -> None:
    assert quantile(sorted(values), q) == np.quantile(values, q, method="inverted_cdf")


def test_quantiles_by_name() -> None:
    found = quantiles([float(n) for n in range(100, 0, -1)])
    assert found == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert quantiles([]) == {}


def test_tokens_of_one_message_came_together() -> None:
    made = trace(0, 10.0, (10.5, 1), (11.5, 4), (12.0, 2))
    assert (made.first_token, made.end_to_end, made.tokens) == (0.5, 2.0, 7)
    assert made.gaps == [1.0, 0.0, 0.0, 0.0, 0.5, 0.0]
    assert made.mean_gap == 0.25 == pytest.approx(sum(made.gaps) / 6)
    assert trace(0, 1.0, (1.5, 3)).gaps == [0.0, 0.0]
    assert trace(0, 1.0, (1.5, 1)).mean_gap is None and trace(0, 1.0).first_token is None


def test_latency_counts_from_the_planned_send_time() -> None:
    late = trace(0, 10.0, (13.5, 1), (14.0, 1), sent=13.0)
    found = summarise([late], 0)
    assert found["time_to_first_token"]["p50"] == 3.5 and found["end_to_end"]["max"] == 4.0
    assert found["send_delay"]["max"] == 3.0


def test_what_fails_is_counted_and_its_tokens_are_not_lost() -> None:
    traces = [
        trace(0, 0.0, (1.0, 1), (2.0, 1)),
        trace(1, 1.0, (1.5, 1), status="UNAVAILABLE", ended=3.0),
        trace(2, 2.0, status="RESOURCE_EXHAUSTED", ended=2.5),
        trace(3, 0.0, (4.0, 1), asked=2),
    ]
    assert traces[3].status == INCOMPLETE
    found = summarise(traces, 0)
    assert (found["requests"], found["errors"], found["output_tokens"], found["seconds"]) == (1, 3, 4, 4.0)
    assert found["first_reasons"] == {"UNAVAILABLE": "", "RESOURCE_EXHAUSTED": "", INCOMPLETE: ""}
    assert found["statuses"] == {"UNAVAILABLE": 1, "RESOURCE_EXHAUSTED": 1, INCOMPLETE: 1}
    assert (found["tokens_per_second"], found["requests_per_second"]) == (1.0, 0.25)
    assert found["time_to_first_token"] == quantiles([1.0])  # of what was answered in full
    nothing = summarise([trace(0, 5.0, status="UNAVAILABLE")], 1)
    assert (nothing["errors"], nothing["output_tokens"], nothing["time_to_first_token"]) == (1, 0, {})


def test_goodput_of_known_traces() -> None:
    traces = [
        trace(0, 0.0, (0.1, 1), (0.3, 1), (0.5, 1)),  # first token 0.1, mean gap 0.2
        trace(1, 0.0, (0.4, 1), (0.5, 1), (0.6, 1)),  # 0.4, 0.1
        trace(2, 0.0, (0.1, 1), (1.1, 1), (2.0, 1)),  # 0.1, 0.95
        trace(3, 0.0, (0.1, 1), (0.2, 1), status="INTERNAL"),  # fast, and an error
        trace(4, 0.0, (0.2, 1)),  # one token has no gap
    ]

    def good(slo: Slo) -> tuple[int, float]:
        found = summarise(traces, 0, slo)["goodput"]
        assert found["requests_per_second"] == found["requests"] / 2.0
        assert found["share"] == found["requests"] / 5
        return found["requests"], 2.0 * found["tokens_per_second"]

    assert good(Slo(ttft=0.3)) == (3, 7)
    assert good(Slo(itl=0.25)) == (3, 7)
    assert good(Slo(ttft=0.3, itl=0.25)) == (2, 4)
    assert good(Slo(ttft=0.1, itl=1.0)) == (2, 6)  # as long as allowed is in time
    assert good(Slo(ttft=0.05)) == (0, 0)
    assert "goodput" not in summarise(traces, 0, Slo())


def test_the_steady_rate_leaves_out_ramps() -> None:
    """Two streams, a token a second each: from the later first token at 3 to the earlier end at 6."""
    one = trace(0, 0.0, *((float(t), 1) for t in range(1, 7)))
    two = trace(1, 0.0, *((float(t), 1) for t in range(3, 9)))
    assert steady([one, two], 2) == Steady(6.0, 3.0)  # at 4, 5 and 6
    assert steady([one, two], 1) == Steady(11.0, 7.0)
    assert steady([one, two], 3) is None
    assert steady([trace(0, 0.0, (1.0, 1)), trace(1, 0.0, (2.0, 1))], 2) is None
    after = trace(2, 0.0, *((float(t), 1) for t in range(7, 10)))  # takes the first one's place
    assert steady([one, two, after], 2) == Steady(5 + 3 + 2, 5.0)  # until 8


@given(
    st.lists(st.floats(0, 3), min_size=1, max_size=9), st.integers(1, 8), st.sampled_from([0.25, 1.0, 7.0])
)
def test_one_wave_rate_does_not_depend_on_token_bundling(
    begins: list[float], interval: int, seconds: float
) -> None:
    """Each stream has a token every `seconds`; first ones come alone. No message at an edge is lost."""

    def stream(index: int) -> Trace:
        times = [(begins[index], 1)]
        while len(times) <= 40 // interval:
            times.append((times[-1][0] + interval * seconds, interval))
        return trace(index, 0.0, *times)

    found = steady([stream(index) for index in range(len(begins))], len(begins))
    assert found is not None
    assert found.rate == pytest.approx(len(begins) / seconds)
    assert found.seconds == pytest.approx(40 // interval * interval * seconds - (max(begins) - min(begins)))


def test_streams_that_cannot_run_together_have_no_rate() -> None:
    """A loop of 4 with 2 requests has 2 streams; in another the second begins behind the first one's end."""

    def told(traces: list[Trace], concurrency: int) -> list[float | None]:
        found = summarise(traces, concurrency)
        return [found[name] for name in ("streams", "steady_seconds", "steady_tokens_per_second")]

    one, two, late = (trace(n, 0.0, (at, 1), (at + 2, 4)) for n, at in enumerate((1.0, 2.0, 3.5)))
    assert told([one, two], 4) == [2, 1.0, 4.0]
    assert told([one, late], 2) == [2, None, None]
    assert told([one, two], 0) == [None, None, None]


def test_a_trace_survives_its_json() -> None:
    made = trace(7, 1.25, (2.5, 1), (3.5, 4), sent=1.5)
    assert Trace.from_values(json.loads(json.dumps(made.values()))) == made
