"""The Dockerfile's stages. `make image` builds the CPU target and serves from it."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
TARGETS = {"cpu": "runtime", "cuda": "runtime-cuda"}


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions by stage, in order. Those before the first stage have the name ''."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for item in DockerfileParser(fileobj=BytesIO((ROOT / "Dockerfile").read_bytes())).structure:
        if item["instruction"] == "FROM":
            found[item["value"].partition(" AS ")[2]] = []
        if item["instruction"] != "COMMENT":
            found[list(found)[-1]].append((item["instruction"], item["value"]))
    return found


def test_base_images_default_to_tags() -> None:
    found = stages()
    bases = {stage[0][1].partition(" AS ")[0] for name, stage in found.items() if name}
    assert bases - set(found) == {"${PYTHON_IMAGE}", "${CUDA_IMAGE}", "scratch"}
    defaults = dict(value.partition("=")[::2] for kind, value in found[""] if kind == "ARG")
    assert set(defaults) == {"PYTHON_IMAGE", "CUDA_IMAGE"}
    assert all(re.fullmatch(r"[\w/]+:[\w.-]+", image) for image in defaults.values())


def test_default_target_is_cpu() -> None:
    assert list(stages())[-1] == "cpu"


@pytest.mark.parametrize("target", TARGETS)
def test_dependencies_and_code_are_separate_layers(target: str) -> None:
    """Only the last two copies add files to the target, the code after what it depends on."""
    found = stages()
    assert found[target][:3] == [
        ("FROM", f"{TARGETS[target]} AS {target}"),
        ("COPY", f"--from=dependencies-{target} /opt/ep-server /opt/ep-server"),
        ("COPY", f"--from=package-{target} /package /"),
    ]
    assert {kind for kind, _ in found[target][3:]} == {"ARG", "LABEL"}
    sources = [value for kind, value in found[f"dependencies-{target}"] if kind == "COPY"]
    assert sources == ["--from=requirements /requirements.txt ./"]


@pytest.mark.parametrize("stage", TARGETS.values())
def test_server_runs_without_privileges(stage: str) -> None:
    assert [value for kind, value in stages()[stage] if kind == "USER"][-1] == "10001:10001"


def test_build_context_has_only_what_is_copied() -> None:
    copied = {
        word
        for stage in stages().values()
        for kind, value in stage
        if kind == "COPY" and not value.startswith("--from")
        for word in value.split()[:-1]
    }
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent and all(any(ROOT.glob(name)) for name in sent)
