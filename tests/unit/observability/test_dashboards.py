"""The committed dashboards: up to date, within Grafana's model, and of one make."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.models import dashboard as model

from tests.support.observability.files import DASHBOARDS, ROOT, dashboard, queries

NAMES = ("overview", "communication", "experts", "scheduler", "regression")


def test_the_committed_files_are_what_the_script_writes(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "dashboards.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=120)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(written) == {f"{name}.json" for name in NAMES}
    assert written == {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}


@pytest.mark.parametrize("name", NAMES)
def test_grafanas_own_types_read_a_dashboard_back(name: str) -> None:
    read = model.Dashboard.from_json(dashboard(name))
    assert read.uid == f"epserver-{name}" and read.title and read.panels
    assert [variable.name for variable in read.templating.list_val or ()] == [
        *("datasource", "namespace", "model", "job", "instance", "rank")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_says_what_it_shows_and_overlaps_no_other(name: str) -> None:
    panels: list[dict[str, Any]] = dashboard(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        axis = panel["options"]["yAxis"] if panel["type"] == "heatmap" else panel["fieldConfig"]["defaults"]
        assert panel["targets"] and axis["unit"], panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))


@pytest.mark.parametrize("name", NAMES)
def test_every_query_asks_for_the_chosen_servers_only(name: str) -> None:
    """A selector without the variables would mix what other releases measure into the panel."""
    for title, expression in queries(dashboard(name)):
        selectors = re.findall(r"(epserver[\w:]*|process_\w+|ALERTS)(\{[^}]*\})?", expression)
        assert selectors, title
        for metric, labels in selectors:
            assert 'namespace=~"$namespace", job=~"$job"' in labels, (title, metric)


def test_what_the_issue_of_a_slow_exchange_needs_is_there() -> None:
    kinds = {panel["title"]: panel for panel in dashboard("communication")["panels"]}
    for op in ("Dispatch", "Combine"):
        heat = kinds[f"{op}: how long it takes"]
        assert heat["type"] == "heatmap" and heat["targets"][0]["format"] == "heatmap"
    matrix = kinds["Who waits for whom: $instance"]
    (grouping,) = matrix["transformations"]
    assert (grouping["id"], matrix["repeat"]) == ("groupingToMatrix", "instance")
    assert grouping["options"] == {"rowField": "rank", "columnField": "peer", "valueField": "Value"}


def test_a_deploy_is_marked_at_the_moment_of_the_start() -> None:
    for name in NAMES:
        (starts,) = dashboard(name)["annotations"]["list"]
        assert "process_start_time_seconds" in starts["expr"] and starts["useValueForTime"] == "on"
        assert "{{version}}" in starts["titleFormat"]


def test_json_is_stable_for_reviews() -> None:
    for path in DASHBOARDS.glob("*.json"):
        tree = json.loads(path.read_text())
        assert path.read_text() == json.dumps(tree, indent=1, sort_keys=True) + "\n"
