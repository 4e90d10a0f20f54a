"""Charts are well-formed, and show each value at its height."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from ep_server.cli.bench import pictures
from ep_server.cli.bench.breakdown import Steps
from ep_server.cli.bench.chart import BOTTOM, HEIGHT, TOP, Bars, Lines, Series, svg
from ep_server.cli.bench.offline_plan import Result, Round
from ep_server.cli.bench.trace import OK, Trace

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ET.Element:
    assert "nan" not in text and "inf" not in text
    return ET.fromstring(text)


def test_a_line_goes_through_its_points() -> None:
    panel = Lines(
        "rate", "x", [(1.0, "1"), (8.0, "8"), (32.0, "32")], [Series("a", [(1, 0), (8, 50), (32, 100)])]
    )
    root = parsed(svg("t < u", [panel]))
    (path,) = (
        root.iter(f"{SVG}path") if False else [p for p in root.iter(f"{SVG}path") if p.get("class") == "line"]
    )
    places = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path.get("d", ""))]
    (x0, bottom), (x1, middle), (x2, top) = places
    assert (bottom, top) == (HEIGHT - BOTTOM, TOP) and middle == pytest.approx((bottom + top) / 2)
    assert x1 - x0 == pytest.approx(x2 - x1)  # marks stand at equal distances
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"t < u", "rate", "1", "8", "32", "a", "100"} <= set(words)


def test_bars_are_as_high_as_their_sum() -> None:
    root = parsed(svg("t", [Bars("ms", "x", [("1", {"a": 30.0, "b": 70.0})], [50.0])]))
    bars = [r for r in root.iter(f"{SVG}rect") if r.get("width") == "70.0"]
    heights = [float(bar.get("height", "")) for bar in bars]
    assert sum(heights) == pytest.approx(HEIGHT - TOP - BOTTOM, abs=0.2)
    assert heights[0] / heights[1] == pytest.approx(3 / 7, rel=0.01)


def test_pictures_of_results() -> None:
    phases = {"attention": 0.001, "experts": 0.002, "host": 0.0005}
    steps = Steps(9, 0.0035, phases, 4.0, (1.0, 1.0), (3, 3), {})
    results = [
        Result(1, 2, (Round(90.0, 100.0, 80.0, steps),)),
        Result(8, 2, (Round(None, None, 10.0, None),)),
    ]
    root = parsed(pictures.offline("m", results, {1: {"attention": 0.0005}, 8: {}}))
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"attention", "experts", "host", "bound", "directly", "by difference", "8"} <= set(words)
    traces = [Trace(i, 3, float(i), float(i), i + 2.0, OK, [(i + 0.5, 1), (i + 2.0, 2)]) for i in range(5)]
    words = [text.text for text in parsed(pictures.online("m", traces)).iter(f"{SVG}text")]
    assert {"first token", "mean gap", "end to end", "99 %", "tokens/s"} <= set(words)
    parsed(pictures.online("m", [Trace(0, 3, 1.0, 1.0, 2.0, "UNAVAILABLE")]))  # nothing to show is no error
