"""Charts of results are well-formed and name what they show."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from ep_server.cli.bench.breakdown import Steps
from ep_server.cli.bench.charts import offline_chart, online_chart
from ep_server.cli.bench.load import OK, Trace
from ep_server.cli.bench.summary import Result, Round

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ET.Element:
    assert "nan" not in text and "inf" not in text
    return ET.fromstring(text)


def test_charts_of_results() -> None:
    phases = {"attention": 0.001, "experts": 0.002, "host": 0.0005}
    steps = Steps(9, 0.0035, phases, 4.0, (1.0, 1.0), (3, 3), {})
    results = [
        Result(1, 2, (Round(90.0, 100.0, 80.0, steps),)),
        Result(8, 2, (Round(None, None, 10.0, None),)),
    ]
    root = parsed(offline_chart("m", results, {1: {"attention": 0.0005}, 8: {}}))
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"attention", "experts", "host", "bound", "directly", "by difference", "8"} <= set(words)
    traces = [Trace(i, 3, float(i), float(i), i + 2.0, OK, [(i + 0.5, 1), (i + 2.0, 2)]) for i in range(5)]
    words = [text.text for text in parsed(online_chart("m", traces)).iter(f"{SVG}text")]
    assert {"first token", "mean gap", "end to end", "99 %", "tokens/s"} <= set(words)
    parsed(online_chart("m", [Trace(0, 3, 1.0, 1.0, 2.0, "UNAVAILABLE")]))  # nothing to show is no error
