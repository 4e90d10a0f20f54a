"""Links of the documentation lead somewhere, alerts have their runbook, commands that it names exist."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import typer
import yaml

from ep_server.cli.main import app
from ep_server.config import fields

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md"), *ROOT.glob("helm/*/README.md")]
)
RUNBOOK = ROOT / "docs" / "operations.md"


def anchors(page: Path) -> set[str]:
    """Those that a forge gives the headings: small letters, spaces as hyphens, other signs dropped."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    rules = [
        rule
        for file in ROOT.glob("helm/ep-server/files/rules/*.yaml")
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(rules) > 10
    for rule in rules:
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / path) == RUNBOOK and anchor in anchors(RUNBOOK), rule["alert"]
    text = RUNBOOK.read_text(encoding="utf-8")
    told = dict(re.findall(r"^### (EpServer\w+)\n\n(\w+) · ", text, re.MULTILINE))
    assert told == {rule["alert"]: rule["labels"]["severity"] for rule in rules}
    assert set(re.findall(r"EpServer[A-Z]\w+", text)) == set(told)


def test_commands_and_options_that_the_runbook_names_exist() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    commands = {command.name for command in app.registered_commands}
    assert set(re.findall(r"\bep-server (?!-)([a-z]+)\b(?!\.)", text)) <= commands
    names, sections = {name for name, _, _ in fields()}, {section for _, section, _ in fields()}
    dotted = set(re.findall(r"`([a-z]+\.[a-z_]+)(?: \w+)?`", text))
    assert {name for name in dotted if name.partition(".")[0] in sections} <= names


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md"])
def test_commands_in_docs_use_existing_flags(page: str) -> None:
    known = {
        name: {flag for parameter in command.params for flag in parameter.opts}
        for name, command in typer.main.get_group(app).commands.items()
    }
    names, tried = {name for name, _, _ in fields()}, 0
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^ep-server (.*)$", text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        given = {word for word in words if re.fullmatch(r"--[a-z-]+", word)}
        assert given <= known[words[0]], line
        sets = [after for word, after in pairwise(words) if word == "--set"]
        assert {value.partition("=")[0] for value in sets} <= names, line
        tried += len(given)
    assert tried > 5


def test_decode_charts_draw_the_benchmarks() -> None:
    """docs/figures/decode.json has the table's figures; both charts were drawn after it was changed last."""
    figures = ROOT / "docs" / "figures"
    found = json.loads((figures / "decode.json").read_text())
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = text[text.index("\n## Decode on GPUs\n") : text.index("\n## Exchange on NVLink\n")]
    told = set(re.findall(r"[\d,]+(?:\.\d+)?", section.replace(", ", " ")))
    series = [series for panel in found["rates"] for series in panel["series"]]
    for line in series:
        for sequences, values in line["points"].items():
            assert {f"{value:,}" for value in values} <= told, (line["name"], sequences)
    for bar in found["step"]["bars"]:
        assert {f"{ms:.2f}" for ms in [*bar["ms"], bar["all"]] if ms} <= told, bar["name"]
    charts = {"decode.svg": [], "decode_step.svg": [f"{bar['all']:.2f}" for bar in found["step"]["bars"]]}
    for line in series:
        if "labels" in line:
            charts["decode.svg"] += [f"{values[0]:,}" for values in line["points"].values()]
    for name, labels in charts.items():
        drawn = set(re.findall(r">([\d,.]+)</text>", (figures / name).read_text(encoding="utf-8")))
        command = "python benchmarks/decode_chart.py docs/figures/decode.json"
        assert labels and set(labels) <= drawn, f"{name}: {command}"
