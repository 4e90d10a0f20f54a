"""The version has one source, and `make install` picks the pinned versions for the machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import ep_server

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(re.findall(r"^([\w.-]+)([<=]=.+)$", "\n".join(lines), re.MULTILINE))


def dry_install(*variables: str) -> str:
    """The commands that `make install` would run."""
    line = ["make", "--always-make", "--dry-run", "install", *variables]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_package_reads_its_version_from_the_source() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ep_server.__version__"}
    assert "version=" not in (ROOT / "setup.py").read_text()


def test_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((ROOT / "helm/ep-server/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == ep_server.__version__


def test_a_release_has_one_version(tmp_path: Path) -> None:
    line = [sys.executable, ROOT / "scripts/version.py"]
    assert subprocess.check_output(line, text=True).strip() == ep_server.__version__
    tag = f"v{ep_server.__version__}"
    assert subprocess.check_output([*line, "--tag", tag], text=True).strip() == ep_server.__version__
    other = subprocess.run([*line, "--tag", "v9.9.9"], capture_output=True, text=True, check=False)
    assert other.returncode == 1 and "tag: 9.9.9" in other.stderr


def test_the_release_workflow_builds_both_targets_and_signs_all() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    targets = {one["target"]: one["suffix"] for one in jobs["images"]["strategy"]["matrix"]["include"]}
    assert targets == {"cpu": "", "cuda": "-cuda"}  # the tags that the chart asks for
    (build,) = (step["with"] for step in jobs["images"]["steps"] if step.get("id") == "build")
    assert build["sbom"] is True and build["push"] is True
    given = {line.partition("=")[0] for line in build["build-args"].splitlines()}
    assert given == set(
        re.findall(r"^ARG (VERSION|REVISION|SOURCE)\b", (ROOT / "Dockerfile").read_text(), re.M)
    )
    runs = [step.get("run", "") for job in jobs.values() for step in job.get("steps", [])]
    assert sum("cosign sign" in text for text in runs) == 2
    assert jobs["images"]["needs"] == ["version", "test"]


@pytest.mark.parametrize("path", ["Dockerfile", "README.md", "docs", "helm"])
def test_image_tags_name_this_version(path: str) -> None:
    place = ROOT / path
    files = [place] if place.is_file() else [p for p in place.rglob("*") if p.suffix in (".md", ".yaml")]
    tags = {tag for file in files for tag in re.findall(r"\bep-server:(\d[\w.]*)", file.read_text())}
    assert tags <= {ep_server.__version__}


def test_changelog_describes_this_version() -> None:
    releases = re.findall(r"^## \[?(\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == ep_server.__version__


@pytest.mark.parametrize(
    ("driver", "chosen", "extras"),
    [("/dev/null", "cuda", "test,lint,docs,cuda"), ("/no/driver", "cpu", "test,lint,docs")],
)
def test_install_picks_versions_by_nvidia_driver(driver: str, chosen: str, extras: str) -> None:
    commands = dry_install(f"DRIVER={driver}")
    assert set(re.findall(r"-c (\S+)", commands)) == {f"constraints-{chosen}.txt"}
    assert f"'.[{extras}]'" in commands


def test_install_device_can_be_overridden() -> None:
    assert "-c constraints-cpu.txt" in dry_install("DRIVER=/dev/null", "DEVICE=cpu")


def test_gpu_versions_are_those_of_the_gpu_tests() -> None:
    """scripts/gpu_check ran with these. torch 2.11.0 from the package index is built for CUDA 13.0."""
    assert pins("constraints-cuda.txt").items() >= {"torch": "==2.11.0", "triton": "==3.6.0"}.items()


def test_device_pins_do_not_contradict_shared_pins() -> None:
    shared = pins("constraints.txt").keys()
    for name in ("constraints-cpu.txt", "constraints-cuda.txt"):
        assert (ROOT / name).read_text().count("\n-c constraints.txt\n") == 1
        assert not pins(name).keys() & shared


def test_cpu_triton_pin_allows_the_version_torch_wants() -> None:
    """A CUDA build of torch asks for an older Triton: an exact pin would make it impossible to install."""
    assert pins("constraints-cpu.txt")["triton"].startswith("<=")


def test_gpu_check_names_tests_that_exist():
    text = (ROOT / "scripts/gpu_check").read_text(encoding="utf-8")
    places = re.findall(r"(?<=\s)tests/[\w/.{},]+", text)
    assert len(places) > 5
    for place in places:
        before, _, rest = place.partition("{")
        names, _, after = rest.partition("}")
        for name in names.split(","):
            assert (ROOT / f"{before}{name}{after}").exists(), place
