"""The chart's rules and dashboards, read for tests; and the same rules with every duration divided."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
RULES = ROOT / "helm" / "ep-server" / "files" / "rules"
DASHBOARDS = ROOT / "helm" / "ep-server" / "files" / "dashboards"

SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
DURATION = r"(\d+)(ms|s|m|h|d|w)"


def rule_groups() -> list[dict[str, Any]]:
    """Every group of every rules file, to change as one likes."""
    return copy.deepcopy(_groups())


@cache
def _groups() -> list[dict[str, Any]]:
    """As they are in the files. Parsing them takes longer than most tests."""
    return [
        group for path in sorted(RULES.glob("*.yaml")) for group in yaml.safe_load(path.read_text())["groups"]
    ]


def alerts() -> dict[str, dict[str, Any]]:
    """Alert rules by name."""
    return {rule["alert"]: rule for group in rule_groups() for rule in group["rules"] if "alert" in rule}


def dashboard(name: str) -> dict[str, Any]:
    """One dashboard as a tree."""
    tree: dict[str, Any] = json.loads((DASHBOARDS / f"{name}.json").read_text())
    return tree


def queries(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(title, expression) of every panel and annotation."""
    for panel in tree["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for annotation in tree["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def faster(factor: int, default_interval: str = "1m") -> list[dict[str, Any]]:
    """The same rules, every duration divided: ranges, offsets, `for` and intervals. Nothing else differs.

    Labels that name a window keep their names, since expressions select by them.
    """
    groups = rule_groups()
    for group in groups:
        group["interval"] = _divided(group.get("interval", default_interval), factor)
        for rule in group["rules"]:
            rule["expr"] = re.sub(
                rf"\[{DURATION}\]|offset {DURATION}",
                lambda found: re.sub(DURATION, lambda d: _divided(d.group(), factor), found.group()),
                rule["expr"],
            )
            if "for" in rule:
                rule["for"] = _divided(rule["for"], factor)
    return groups


def _divided(duration: str, factor: int) -> str:
    number, unit = re.fullmatch(DURATION, duration).groups()  # type: ignore[union-attr]
    return f"{round(int(number) * SECONDS[unit] * 1000 / factor)}ms"
