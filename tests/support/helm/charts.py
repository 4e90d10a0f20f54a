"""The chart as Helm's own engine renders it, and what the refusal of bad values says."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import typer
import yaml

from ep_server.cli import main as cli
from ep_server.config import Config

CHART = Path(__file__).parents[3] / "helm" / "ep-server"
RELEASE, NAMESPACE = "moe", "inference"
MINIMAL: dict[str, Any] = {"model": {"pvc": {"claimName": "checkpoints"}}}

Object = dict[str, Any]


@cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def merged(*values: dict[str, Any]) -> dict[str, Any]:
    """Later wins, as with several --values."""
    whole: dict[str, Any] = {}
    for part in values:
        for name, value in part.items():
            old = whole.get(name)
            both = isinstance(old, dict) and isinstance(value, dict)
            whole[name] = merged(old, value) if both else copy.deepcopy(value)
    return whole


def nested(name: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of a.b"""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def render(*values: dict[str, Any]) -> tuple[list[Object], str]:
    """(every object, NOTES.txt) for MINIMAL and `values`. Raises: helm_python.HelmError."""
    return render_as(RELEASE, *values)


def render_as(release: str, *values: dict[str, Any]) -> tuple[list[Object], str]:
    """`render` under another name of the release."""
    files = chart().render(merged(MINIMAL, *values), name=release, namespace=NAMESPACE)
    (notes,) = (text for path, text in files.items() if path.endswith("NOTES.txt"))
    texts = (text for path, text in sorted(files.items()) if not path.endswith("NOTES.txt"))
    return [made for text in texts for made in yaml.load_all(text, yaml.CSafeLoader) if made], notes


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def of_picker(one: Object) -> bool:
    """Whether it belongs to the endpoint picker, not to the server."""
    labels: dict[str, str] = one["metadata"].get("labels") or {}
    return labels.get("app.kubernetes.io/component") == "endpoint-picker"


def pod_template(objects: list[Object]) -> Object:
    """The template of the server: the one workload among the objects, but for an endpoint picker."""
    (template,) = [
        (one["spec"].get("leaderWorkerTemplate") or {}).get("workerTemplate") or one["spec"]["template"]
        for one in objects
        if one["kind"] in ("StatefulSet", "Deployment", "LeaderWorkerSet") and not of_picker(one)
    ]
    return template  # type: ignore[no-any-return]


def container(objects: list[Object]) -> Object:
    (only,) = pod_template(objects)["spec"]["containers"]
    return only  # type: ignore[no-any-return]


# What the Downward API says where a test does not care.
FIELDS = {"status.podIP": "198.18.0.1", "metadata.labels['apps.kubernetes.io/pod-index']": "0"}


def environment(server: Object, fields: Mapping[str, str] = FIELDS) -> dict[str, str]:
    """The container's environment. fields: what the Downward API says of its Pod, by path."""
    return {
        one["name"]: fields[one["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in one else one["value"]
        for one in server.get("env", [])
    }


def config_of(server: Object, added: Mapping[str, str] | None = None) -> Config:
    """What the server makes of the container's command line and environment. Raises: as it would.

    Args:
        added: variables that a controller adds to its Pods.
    """
    assert server["command"] == ["ep-server"] and server["args"][0] == "serve"
    command = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    given = command.make_context("serve", server["args"][1:]).params
    flags = {name.replace("__", "."): value for name, value in given.items() if "__" in name}
    return Config.load(None, flags, {**environment(server), **(added or {})})
