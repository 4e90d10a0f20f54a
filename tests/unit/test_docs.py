"""The documentation: links, lengths of lines, commands, options and paths that it names, the runbook."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from ep_server.cli.main import app
from ep_server.config import fields

ROOT = Path(__file__).parents[2]
PLACES = ("*.md", ".github/**/*.md", "docs/**/*.md", "examples/**/*.md", "helm/**/*.md")
PAGES = sorted(page for place in PLACES for page in ROOT.glob(place))
DOCS = ROOT / "docs"
RUNBOOK = ROOT / "docs" / "how-to" / "alerts.md"
MAX_LINE, MAX_BULLET = 120, 3
FOLDERS = "ep_server|csrc|protos|tests|helm|scripts|tools|benchmarks|examples"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^( *)```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """What links may name: small letters, spaces as hyphens, other signs dropped."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_generated_tables_are_current() -> None:
    """`make reference` would change nothing."""
    line = [sys.executable, "scripts/reference.py", "--check"]
    ran = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = without_code(page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        if DOCS in page.parents:
            assert DOCS in target.parents, f"{link}: the site has no pages outside docs/"


@each_page
def test_lines_are_short(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    table = re.compile(r" *\|")
    long = [n for n, line in enumerate(lines, 1) if len(line) > MAX_LINE and not table.match(line)]
    assert not long, f"lines of more than {MAX_LINE} characters"


@each_page
def test_bullets_are_short(page: Path) -> None:
    lines = without_code(page.read_text(encoding="utf-8")).splitlines()
    starts = [n for n, line in enumerate(lines) if re.match(r" *(?:[-*]|\d+\.) ", line)]
    long = [n + 1 for n in starts if length_of_bullet(lines[n:]) > MAX_BULLET]
    assert not long, f"bullets of more than {MAX_BULLET} lines"


def length_of_bullet(lines: list[str]) -> int:
    ends = re.compile(r" *(?:$|[-*] |\d+\. |\||<)")
    return next((n for n, line in enumerate(lines) if n and ends.match(line)), len(lines))


@each_page
def test_paths_that_a_page_names_exist(page: Path) -> None:
    if "design-notes" in page.parts:
        return  # dated records name what was there then
    text = without_code(page.read_text(encoding="utf-8"))
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", text)
    missing = [name for name in named if not (ROOT / name).exists() and not (page.parent / name).exists()]
    assert not [name for name in missing if "NAME" not in name]


def rules() -> list[dict[str, Any]]:
    """Every alert of the chart."""
    files = ROOT.glob("helm/ep-server/files/rules/*.yaml")
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_alerts_and_runbook_entries_match() -> None:
    found = rules()
    assert len(found) > 10
    for rule in found:
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / path) == RUNBOOK and anchor in anchors(RUNBOOK), rule["alert"]
    text = RUNBOOK.read_text(encoding="utf-8")
    entries = dict(re.findall(r"^## (EpServer\w+)\n\n(\w+) · ", text, re.MULTILINE))
    assert entries == {rule["alert"]: rule["labels"]["severity"] for rule in found}
    assert set(re.findall(r"EpServer[A-Z]\w+", text)) == set(entries)


FIELDS = ("Impact", "Query", "Command", "Done when")
IN_IMAGE = {"ep-server", "sh", "cat"}  # of python:slim, and ours


def test_each_alert_has_impact_query_command_and_end() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    entries = re.findall(r"^## (EpServer\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    for name, entry in entries:
        found = re.findall(r"^- \*\*([\w ]+):\*\* (.+)$", entry, re.MULTILINE)
        assert tuple(field for field, _ in found) == FIELDS, name
        assert all(re.fullmatch(r"`.*", text) for field, text in found if field in FIELDS[1:3]), name
    for words in re.findall(r"kubectl exec POD -- ([^`\n]+)", text):
        program, command = shlex.split(words)[:2]
        assert program in IN_IMAGE and (program != "ep-server" or command in commands()), words


@each_page
def test_options_that_a_page_names_exist(page: Path) -> None:
    if "design-notes" in page.parts:
        return
    names, sections = {name for name, _, _ in fields()}, {section for _, section, _ in fields()}
    chart = yaml.safe_load((ROOT / "helm" / "ep-server" / "values.yaml").read_text())
    values = {f"{top}.{name}" for top, below in chart.items() if isinstance(below, dict) for name in below}
    dotted = set(re.findall(r"`([a-z]+\.[a-z_]+)(?: = [^`]*)?`", page.read_text(encoding="utf-8")))
    assert {name for name in dotted if name.partition(".")[0] in sections} <= names | values


@cache
def commands() -> dict[str, set[str]]:
    """The flags of every command of ep-server; a command of a group has two words."""
    found: dict[str, set[str]] = {}

    def visit(command: Any, path: str) -> None:
        below = getattr(command, "commands", {})
        if not below:
            found[path] = {flag for parameter in command.params for flag in parameter.opts}
        for name, each in below.items():
            visit(each, f"{path} {name}".strip())

    visit(typer.main.get_group(app), "")
    return found


@each_page
def test_commands_in_code_blocks_have_these_flags(page: Path) -> None:
    known, names = commands(), {name for name, _, _ in fields()}
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^ep-server (?!-)(?!COMMAND)(.*)$", text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        command = next((name for name in (" ".join(words[:2]), words[0]) if name in known), None)
        assert command, line
        given = {word for word in words if re.fullmatch(r"--[a-z-]+", word)}
        assert given <= known[command], line
        sets = [after for word, after in pairwise(words) if word == "--set"]
        assert {value.partition("=")[0] for value in sets} <= names, line


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
