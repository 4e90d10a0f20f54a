"""The rules as promtool sees them: each alert fires on an injected case, and not on its counter-cases."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.observability import latency_cases, load_cases, rank_cases
from tests.support.observability.cases import AlertCases, Case
from tests.support.observability.files import (
    DASHBOARDS,
    ROOT,
    RULES,
    alerts,
    dashboard,
    faster,
    queries,
    rule_groups,
)
from tests.support.observability.prometheus import LABELS

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
FILES = sorted(map(str, RULES.glob("*.yaml")))
ADDED = {**LABELS, "instance": "one:9400"}
CASES: dict[str, AlertCases] = {**latency_cases.CASES, **rank_cases.CASES, **load_cases.CASES}
Group = dict[str, Any]
SEVERITIES = {"critical", "warning"}


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def expected(name: str, case: Case) -> list[dict[str, Any]]:
    """What promtool compares with: all labels and all annotations of the alerts that fire."""
    if case.fires is None:
        return []
    rule = alerts()[name]
    kept = {key: value for key, value in ADDED.items() if key != "instance" or "one:9400" in case.summary}
    annotations = {**rule["annotations"], "summary": case.summary}
    return [{"exp_labels": {**kept, **rule["labels"], **case.fires}, "exp_annotations": annotations}]


def needed(name: str, groups: list[Group]) -> list[Group]:
    """The groups with the rules only that an alert stands on: promtool evaluates every minute of hours."""
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    wanted, text = {name}, alerts()[name]["expr"]
    while more := {each for each in recorded if each in text} - wanted:
        wanted |= more
        text += "".join(rule["expr"] for rule in rules if rule.get("record") in more)
    left = [
        {**group, "rules": [r for r in group["rules"] if {r.get("alert"), r.get("record")} & wanted]}
        for group in groups
    ]
    return [group for group in left if group["rules"]]


def judge(name: str, case: Case, groups: list[Group], folder: Path) -> None:
    """Runs promtool on one case of an alert. Raises: AssertionError with what promtool says."""
    rules, test = folder / "rules.yaml", folder / "test.yaml"
    rules.write_text(json.dumps({"groups": needed(name, groups)}))  # JSON is YAML, written faster
    test.write_text(json.dumps(promtool_case(name, case, groups)))
    promtool("test", "rules", str(test))


def promtool_case(name: str, case: Case, groups: list[Group]) -> dict[str, Any]:
    """One case as promtool reads it, beside its rules.yaml."""
    added = ", ".join(f'{key}="{value}"' for key, value in ADDED.items())
    series = [
        {
            "series": re.sub(
                r"\{(.*)\}", lambda found: f"{{{', '.join(filter(None, [found[1], added]))}}}", each
            ),
            "values": " ".join(str(value) for value in values),
        }
        for each, values in case.series.items()
    ]
    minutes = max(len(values) for values in case.series.values()) - 1
    judged = {"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": expected(name, case)}
    names = sorted((g["name"] for g in needed(name, groups)), key=lambda each: each.endswith("alerts"))
    return {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "group_eval_order": names,
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": [judged]}],
    }


@needs_promtool
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_on_its_case_and_not_on_its_counter_cases(name: str, tmp_path: Path) -> None:
    assert CASES[name].fires and CASES[name].silent
    for title, case in {**CASES[name].fires, **CASES[name].silent}.items():
        print(title)
        judge(name, case, rule_groups(), tmp_path)


@needs_promtool
@pytest.mark.parametrize("hour", ["a busier hour", "a busier hour of the same band"])
def test_a_busier_hour_is_silent_because_of_its_load(hour: str, tmp_path: Path) -> None:
    """With rules that do not look at the load it would fire: the counter-case is a close one."""
    groups = rule_groups()
    recording = {rule.get("record"): rule for group in groups for rule in group["rules"]}
    one_band = "1 + 0 * epserver:step_tokens:mean_5m"
    band = recording["epserver:batch_band:5m"]
    band["expr"] = re.sub(r"2 \^ floor\(log2\(.*?, 1\)\)\)", one_band, band["expr"])
    recording["epserver:latency_seconds:expected"]["expr"] = "epserver:latency_seconds:baseline"
    case = CASES["EpServerCommLatencyRegression"]
    would = dataclasses.replace(case.fires["mean"], series=case.silent[hour].series)
    judge("EpServerCommLatencyRegression", would, groups, tmp_path)


@needs_promtool
def test_promtool_finds_nothing_wrong() -> None:
    promtool("check", "rules", *FILES)


def test_every_alert_has_cases_severity_and_runbook() -> None:
    assert set(CASES) == set(alerts())
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in SEVERITIES
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/how-to/alerts.md#{name.lower()}"


def test_faster_rules_differ_in_their_durations_only() -> None:
    """What the live tests run: 5 minutes become 5 seconds, nothing else moves."""

    def without_durations(groups: list[Group]) -> list[dict[str, str]]:
        rules = [rule for group in groups for rule in group["rules"]]
        ranges = r"\[\w+\]|offset \w+"
        return [{**rule, "for": "", "expr": re.sub(ranges, "...", rule["expr"])} for rule in rules]

    fast = faster(60)
    assert without_durations(rule_groups()) == without_durations(fast)
    expressions = [rule["expr"] for group in fast for rule in group["rules"]]
    assert any("[5000ms]" in each for each in expressions) and not any("[5m]" in each for each in expressions)
    assert any("[1440000ms] offset 30000ms" in each for each in expressions)


def known_metrics() -> set[str]:
    """Names that a server exports, with the suffixes of histograms, and names that rules record."""
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    exported = dict(re.findall(r"^\| `(epserver_\w+)` \| (\w+) \|", reference, re.MULTILINE))
    parts = {f"{name}_{part}" for name in exported for part in ("bucket", "sum", "count")}
    recorded = {rule["record"] for group in rule_groups() for rule in group["rules"] if "record" in rule}
    return {name for name, kind in exported.items() if kind != "histogram"} | parts | recorded


def test_rules_and_dashboards_query_only_known_metrics() -> None:
    asked = [rule["expr"] for group in rule_groups() for rule in group["rules"]]
    asked += [
        expression for path in DASHBOARDS.glob("*.json") for _, expression in queries(dashboard(path.stem))
    ]
    names = {name for expression in asked for name in re.findall(r"epserver[:_][\w:]*", expression)}
    assert len(names) > 50
    assert names - known_metrics() == set()


def test_runbook_queries_are_promql_over_known_metrics(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool")
    text = (ROOT / "docs" / "how-to" / "alerts.md").read_text(encoding="utf-8")
    asked = re.findall(r"\*\*Query:\*\* `([^`]+)`", text)
    assert len(asked) == len(alerts())
    names = {name for each in asked for name in re.findall(r"epserver[:_][\w:]*", each)}
    assert names - known_metrics() == set()
    rules = [{"record": f"runbook:{at}", "expr": each} for at, each in enumerate(asked)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "runbook", "rules": rules}]}))
    promtool("check", "rules", "--lint=none", str(tmp_path / "rules.yaml"))


def test_every_rule_records_what_something_reads() -> None:
    read = " ".join(rule["expr"] for group in rule_groups() for rule in group["rules"])
    read += " ".join(expr for path in DASHBOARDS.glob("*.json") for _, expr in queries(dashboard(path.stem)))
    recorded = {rule["record"] for group in rule_groups() for rule in group["rules"] if "record" in rule}
    assert {name for name in recorded if name not in read} == set()
