"""The Dockerfile: its linter, its stages, and the CPU target built without an engine and served from.

The build needs root and Debian's debootstrap, which makes what stands in for the base image.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
TOOLS = ("debootstrap", "unshare", "nsenter", "setpriv", "chroot", "ip")
MODEL = "/opt/ep-server/lib/python3.11/site-packages/ep_server/assets/demo_model"
# What pip takes from its surroundings, as an engine takes a proxy from its own.
OUTSIDE = re.compile(r"PIP_(?!CONFIG)\w+|(https?|no)_proxy|SSL_CERT_\w+", re.IGNORECASE)
# $1 root; the rest a command: read-only but for /tmp, loopback alone, no privilege.
CONTAINER = """
set -e
root=$1; shift
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"; mount -t proc proc "$root/proc"; mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -o remount,bind,ro "$root"
ip link set lo up
exec setpriv --no-new-privs chroot --userspec=10001:10001 --groups= "$root" "$@"
"""


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for item in DockerfileParser(fileobj=BytesIO((ROOT / "Dockerfile").read_bytes())).structure:
        if item["instruction"] == "FROM":
            found[item["value"].partition(" AS ")[2]] = []
        if item["instruction"] != "COMMENT":
            found[list(found)[-1]].append((item["instruction"], item["value"]))
    return found


def test_images_are_pinned_and_last_stages_hold_only_the_venv() -> None:
    found = stages()
    outside = {
        value.partition(" AS ")[0] for stage in found.values() for kind, value in stage if kind == "FROM"
    }
    assert outside - set(found) == {"${PYTHON_IMAGE}@${PYTHON_DIGEST}", "${CUDA_IMAGE}@${CUDA_DIGEST}"}
    defaults = dict(value.partition("=")[::2] for kind, value in found[""] if kind == "ARG")
    assert {text for name, text in defaults.items() if name.endswith("DIGEST")} == {"sha256:" + 64 * "0"}
    for target, base in (("cpu", "runtime"), ("cuda", "runtime-cuda")):
        kinds = [kind for kind, _ in found[target]]
        assert found[target][0] == ("FROM", f"{base} AS {target}") and "RUN" not in kinds
        assert found[target][-1] == ("COPY", f"--from=install-{target} /opt/ep-server /opt/ep-server")
    assert found["runtime-cuda"][0] == ("FROM", "runtime AS runtime-cuda")
    for stage in ("runtime", "runtime-cuda"):
        assert [value for kind, value in found[stage] if kind == "USER"][-1] == "10001:10001"


def test_what_is_copied_is_what_an_engine_is_sent() -> None:
    copied = {
        word
        for stage in stages().values()
        for kind, value in stage
        if kind == "COPY" and not value.startswith("--from")
        for word in value.split()[:-1]
    }
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent and all((ROOT / name).exists() for name in sent)


def run(*line: str | Path, **options: Any) -> str:
    done = subprocess.run(
        line, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    assert done.returncode == 0, f"{line[0]}: {done.stdout[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian with Python: what the slim Python image is, but for the place of `python`."""
    root = tmp_path_factory.mktemp("base") / "root"
    codename = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
    assert codename is not None
    listed = ("--format", "$(REPO_URI)", "Created-By: Packages", f"Codename: {codename[1]}")
    mirror = run("apt-get", "indextargets", *listed).split()[0]
    packages = "--include=python3,python3-venv,python3-dev,ca-certificates"
    run("debootstrap", "--variant=minbase", packages, codename[1], root, mirror, timeout=900)
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    return root


def replay(target: str, out: Path, **images: Path) -> Path:
    """Builds a target. images: folders that stand for them. Returns: the folder of its stages."""
    outside = {name: value for name, value in os.environ.items() if OUTSIDE.fullmatch(name)}
    paths = {"/etc/resolv.conf", "/etc/ssl/certs", *outside.values()}
    flags = [f"--env={name}={value}" for name, value in outside.items()]
    flags += [f"--bind={path}" for path in sorted(paths) if path.startswith("/") and Path(path).exists()]
    flags += [f"--image={name.replace('_', '/')}={folder}" for name, folder in images.items()]
    script = ROOT / "scripts" / "image_replay.py"
    line = (sys.executable, script, f"--target={target}", f"--out={out}", "--build-arg=TORCH_INDEX=")
    run(*line, *flags, timeout=1800)
    return out


@pytest.fixture(scope="module")
def image(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the stages of the CPU target."""
    out = replay("cpu", tmp_path_factory.mktemp("stages"), python=base)
    yield out
    shutil.rmtree(out)


@contextmanager
def container(image: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The image's own entry point, environment, user and working directory, as process 1 of its own."""
    told = json.loads((image / "cpu.json").read_text())
    env = ("/usr/bin/env", "-i", "-C", told["WORKDIR"], *(f"{k}={v}" for k, v in told["ENV"].items()))
    spaces = ("unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child")
    line = (*spaces, "bash", "-c", CONTAINER, "container", str(image / "cpu"), *env)
    process = subprocess.Popen([*line, *told["ENTRYPOINT"], *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def inside(process: subprocess.Popen[bytes], image: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a container, as an engine's exec and its health probe do."""
    told = json.loads((image / "cpu.json").read_text())
    first = psutil.Process(process.pid).children()[0].pid
    enter = ("nsenter", f"--target={first}", "--mount", "--net", "--pid", f"--root=/proc/{first}/root")
    who = (
        "--setuid=10001",
        "--setgid=10001",
        "/usr/bin/env",
        "-i",
        *(f"{k}={v}" for k, v in told["ENV"].items()),
    )
    return subprocess.run([*enter, *who, *command], capture_output=True, text=True, check=False, timeout=60)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS),
    reason=f"needs root and {', '.join(TOOLS)}",
)


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_cpu_target_is_built_and_serves(image: Path) -> None:
    root, told = image / "cpu", json.loads((image / "cpu.json").read_text())
    assert (
        not list(root.glob("usr/bin/g++*")) and not (root / "src").exists() and not (root / "wheels").exists()
    )
    installed = root / "opt/ep-server/lib/python3.11/site-packages"
    assert (installed / "ep_server/_C.cpython-311-x86_64-linux-gnu.so").exists()
    assert list(root.glob("usr/lib/*/libfabric.so.1"))
    assert not (installed / "pip").exists() and not list(installed.glob("ep_server/_cuda*.so"))
    assert told["LABEL"]["org.opencontainers.image.title"] == "ep-server"
    probe = json.loads(told["HEALTHCHECK"].partition("CMD ")[2])

    with container(
        image, *told["CMD"], f"--model={MODEL}", "--ranks=2", "--scheduler-kv-blocks=64"
    ) as server:
        end = time.monotonic() + 120
        while inside(server, image, *probe).returncode and time.monotonic() < end:
            assert server.poll() is None
            time.sleep(0.5)
        health = inside(server, image, *probe)
        assert (health.returncode, health.stdout) == (0, "SERVING\n"), health.stderr
        answer = inside(server, image, "ep-server", "generate", "12 + 30 =", "--temperature=0")
        assert answer.stdout.strip() == "42", answer.stderr
        status = inside(server, image, "/bin/grep", "-E", "^(Uid|CapEff|NoNewPrivs)", "/proc/1/status").stdout
        assert status.split() == ["Uid:", *["10001"] * 4, "CapEff:", "0" * 16, "NoNewPrivs:", "1"]
        for path in ("/opt/ep-server/x", "/x", "/var/x"):
            assert "Read-only file system" in inside(server, image, "/bin/touch", path).stderr
        psutil.Process(server.pid).children()[0].send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


@needs_root
@pytest.mark.skipif(not Path("/usr/local/cuda/bin/nvcc").exists(), reason="needs a CUDA toolkit")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_of_the_cuda_target_is_built(base: Path, tmp_path: Path) -> None:
    toolkit = tmp_path / "toolkit"
    (toolkit / "usr/local").mkdir(parents=True)
    shutil.copytree(Path("/usr/local/cuda").resolve(), toolkit / "usr/local/cuda", symlinks=True)
    out = replay("wheel-cuda", tmp_path / "stages", python=base, nvidia_cuda=toolkit)
    (wheel,) = out.glob("wheel-cuda/wheels/*.whl")
    with zipfile.ZipFile(wheel) as archive:
        native = {name.partition(".")[0] for name in archive.namelist() if name.endswith(".so")}
    assert native == {"ep_server/_C", "ep_server/_cuda"}
    shutil.rmtree(out)
