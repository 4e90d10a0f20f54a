"""Keeps the generated parts of the Helm chart: writes them, or with `--check` fails where they differ.

values.schema.json: `config` from the options of the server, what may not be null, and the layout of the file.
README.md: the table of values between the two marks, from values.yaml and the comments above each value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ep_server.config import field_type, fields

CHART = Path(__file__).parents[1] / "helm" / "ep-server"
WIDTH = 120
MARKS = ("<!-- values -->\n", "<!-- end of values -->\n")
# What the chart says itself, by flags; everything else may stand in `config`.
OWNED = {
    "model.path", "model.name", "parallel.ranks", "grpc.host", "grpc.port", "grpc.tls_cert", "grpc.tls_key",
    "grpc.tls_client_ca", "grpc.token_file", "grpc.drain_seconds", "metrics.enabled", "metrics.host",
    "metrics.port", "cluster.nodes", "cluster.node_rank", "cluster.rendezvous", "cluster.hostfile",
    "cluster.token_file", "cluster.tls_cert", "cluster.tls_key", "cluster.tls_ca", "cluster.connect_seconds",
    "fabric.traffic_class", "fabric.gid_index", "handoff.role", "handoff.host", "handoff.port",
}  # fmt: skip
TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def config_schema() -> dict[str, Any]:
    """The schema of `config`: what `ep-server config` lists, less what the chart owns."""
    sections: dict[str, dict[str, Any]] = {}
    for name, section, item in fields():
        if name in OWNED:
            continue
        low, high, choices = (item.metadata[key] for key in ("low", "high", "choices"))
        rule: dict[str, Any] = (
            {"enum": list(choices)} if choices else {"type": TYPES[field_type(section, item.name)]}
        )
        bounds = {key: value for key, value in (("minimum", low), ("maximum", high)) if value is not None}
        rule = {"anyOf": [rule, {"type": "integer", **bounds}]} if choices and bounds else rule | bounds
        sections.setdefault(section, {})[item.name] = rule
    closed: dict[str, Any] = {"type": "object", "additionalProperties": False}
    rules = {name: {**named(closed, of), "properties": of} for name, of in sections.items()}
    return {**named(closed, rules), "properties": rules}


def required(schema: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The schema, in which every value with a default must stay: null would take it away unnoticed."""
    if "properties" not in schema:
        return schema
    rules = {
        name: required(rule, values[name]) if isinstance(values.get(name), dict) else rule
        for name, rule in schema["properties"].items()
    }
    kept = [name for name in rules if values.get(name) is not None]
    rest = {key: value for key, value in schema.items() if key not in ("properties", "required")}
    return {**named(rest, rules), "required": kept, "properties": rules}


def named(schema: dict[str, Any], rules: dict[str, Any]) -> dict[str, Any]:
    """The schema, whose error about an unknown name lists the known ones where it is closed."""
    if schema.get("additionalProperties") is not False:
        return schema
    return {**schema, "propertyNames": {"enum": sorted(rules)}}


def laid_out(value: Any, indent: int = 0) -> str:
    """JSON with a member a line, but in one line what fits there."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or not value or indent + len(line) <= WIDTH - 20:
        return line
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        members = [f"{json.dumps(key)}: {laid_out(item, indent + 2)}" for key, item in value.items()]
        return "{\n" + ",\n".join(pad + member for member in members) + "\n" + " " * indent + "}"
    items = [laid_out(item, indent + 2) for item in value]
    return "[\n" + ",\n".join(pad + item for item in items) + "\n" + " " * indent + "]"


def schema_text() -> str:
    """values.schema.json as it must be."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    schema = required(schema, yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))
    schema["properties"]["config"] = config_schema()
    return laid_out(schema) + "\n"


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """(dotted name, default as JSON, comment above) of every value. Raises: SystemExit if one has none."""
    lines = text.splitlines()

    def walk(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, str, str]]:
        for key, value in node.value:
            name, above = f"{prefix}{key.value}", []
            for line in reversed(lines[: key.start_mark.line]):
                if not line.strip().startswith("#"):
                    break
                above.insert(0, line.strip().lstrip("# "))
            if not above and isinstance(value, yaml.MappingNode) and value.value:
                yield from walk(value, f"{name}.")
            elif not above:
                raise SystemExit(f"values.yaml: {name} has no comment above it")
            else:
                yield name, json.dumps(yaml.safe_load(yaml.serialize(value))), " ".join(above)

    yield from walk(yaml.compose(text), "")


def readme_text() -> str:
    """The chart's README.md as it must be."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    table = ["| value | default | meaning |\n", "|---|---|---|\n"]
    for name, default, comment in rows((CHART / "values.yaml").read_text(encoding="utf-8")):
        table.append(f"| `{name}` | `{default}` | {comment} |\n")
    return before + MARKS[0] + "".join(table) + MARKS[1] + rest.split(MARKS[1])[1]


def main() -> int:
    """Exit code 1 if --check finds a difference."""
    stale = []
    for name, text in (("values.schema.json", schema_text()), ("README.md", readme_text())):
        path = CHART / name
        if path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if stale:
        done = "must be written by scripts/chart.py" if "--check" in sys.argv else "written"
        print(f"{', '.join(stale)}: {done}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
