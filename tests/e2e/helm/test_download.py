"""The chart's download of a checkpoint, run as the init container runs it, from a hub on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.helm.charts import config_of, container, pod_template, render
from tests.support.helm.hub import REPOSITORY, REVISION, Hub, serving
from tests.support.helm.validation import check

WEIGHTS = bytes(range(256)) * 100_000  # the client keeps whole blocks of 10 MiB
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "pytorch_model.bin": b"not needed"}
SOURCE = {"repository": REPOSITORY, "revision": REVISION, "tokenSecret": "hub", "claimName": "downloads"}
VALUES: dict[str, Any] = {"model": {"source": "huggingface", "huggingface": SOURCE}}


def download(hub: Hub, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the init container's command; `folder` stands for its directory."""
    first = pod_template(render(VALUES)[0])["spec"]["initContainers"][0]
    given = {one["name"]: one.get("value", hub.token) for one in first["env"]}
    environment = {
        **given,
        "DIRECTORY": str(folder),
        "HF_HOME": str(folder.parent / "home"),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return subprocess.run(
        first["command"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def damage(file: Path) -> None:
    """Changes the last byte, as a disk might: the file's times stay, so only its checksum shows it."""
    times = file.stat()
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_download_resumes_and_repairs_what_differs(tmp_path: Path) -> None:
    folder, wanted = tmp_path / "model", {"config.json": b"{}", "model.safetensors": WEIGHTS}
    with serving(Hub(FILES, token="secret", cut={"model.safetensors"})) as hub:
        done = download(hub, folder)
        assert done.returncode == 0 and contents(folder) == wanted, done.stderr
        asked = [given for method, path, given in hub.asked if (method, path[-11:]) == ("GET", "safetensors")]
        assert asked == [None, f"bytes={10 << 20}-"]
        damage(folder / "model.safetensors")
        done = download(hub, folder)
        assert done.returncode == 0 and contents(folder) == wanted, done.stderr
        assert "downloading anew" in done.stdout


def test_a_download_without_its_token_fails(tmp_path: Path) -> None:
    with serving(Hub(FILES, token="secret")) as hub:
        hub.token = "another"
        first = Hub(FILES, token="secret", url=hub.url)
        assert download(first, tmp_path / "model").returncode != 0


@pytest.mark.parametrize("claim", ["downloads", ""])
def test_the_server_reads_what_was_downloaded(claim: str) -> None:
    objects, _ = render(VALUES, {"model": {"huggingface": {"claimName": claim}}})
    for one in objects:
        check(one, "1.37")
    pod, server = pod_template(objects)["spec"], container(objects)
    first = pod["initContainers"][0]
    model = config_of(server).model
    given = {one["name"]: one.get("value") for one in first["env"]}
    assert model.path == given["DIRECTORY"] == f"/models/{REVISION}" and model.name == "tiny"
    (volume,) = (one for one in pod["volumes"] if one["name"] == "model")
    assert volume == (
        {"name": "model", "persistentVolumeClaim": {"claimName": claim}}
        if claim
        else {"name": "model", "emptyDir": {}}
    )
    mounts = {one["name"]: one.get("readOnly", False) for one in first["volumeMounts"]}
    assert mounts["model"] is False
    assert next(one for one in server["volumeMounts"] if one["name"] == "model")["readOnly"] is True
