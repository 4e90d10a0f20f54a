"""Builds the CPU image with buildah, serves the demo model from it and reports its size.

By default nothing is pulled: debootstrap makes a base image like python:3.11-slim-bookworm from this
machine's Debian mirror. pip inside the build uses this machine's pip settings. Needs root, buildah and
debootstrap; `scripts/system_packages --all` installs both.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("buildah", "debootstrap", "unshare", "nsenter", "setpriv", "chroot", "ip")
RELEASE = "bookworm"  # of the Dockerfile's default base image
BASE = "localhost/ep-server-base:" + RELEASE
IMAGE = "localhost/ep-server:ci"
ENVIRONMENT = "opt/ep-server"
MODEL = f"/{ENVIRONMENT}/lib/python3.11/site-packages/ep_server/assets/demo_model"
START_SECONDS = 120
# The settings with which pip finds packages. The build mounts the files and folders that they name.
PIP_SOURCES = ("index-url", "extra-index-url", "find-links")
PIP_SETTINGS = (
    *PIP_SOURCES,
    "no-index",
    "cert",
    "client-cert",
    "proxy",
    "trusted-host",
    "timeout",
    "retries",
)
# $1: root folder, the rest: a command. Read-only except for /tmp, loopback only, no privileges.
CONTAINER = """
set -e
root=$1; shift
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"; mount -t proc proc "$root/proc"; mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -o remount,bind,ro "$root"
ip link set lo up
exec setpriv --no-new-privs chroot --userspec=10001:10001 --groups= "$root" "$@"
"""


def run(*line: str | Path, timeout: float = 1800) -> str:
    """Runs a command. Returns: its standard output. Raises: SystemExit with the end of its output."""
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, line[:6]))} ... failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


@contextmanager
def step(name: str) -> Iterator[None]:
    """Prints how long a step took, and the CPU time, which does not depend on what else runs here."""
    print(f"{name} ...", end=" ", flush=True)
    begin = os.times()
    yield
    end = os.times()
    used = end.children_user + end.children_system - begin.children_user - begin.children_system
    print(f"{end.elapsed - begin.elapsed:.0f} s, CPU {used:.0f} s", flush=True)


@dataclass(frozen=True)
class Buildah:
    """buildah with a storage of its own, so that the machine's images are untouched."""

    folder: Path

    def __call__(self, *arguments: str | Path) -> str:
        """Runs `buildah ARGUMENTS`. Returns: its standard output without the last line break."""
        storage = ("--storage-driver=vfs", f"--root={self.folder}/storage", f"--runroot={self.folder}/run")
        return run("buildah", *storage, *arguments).strip()

    def config(self, image: str) -> dict[str, Any]:
        """The settings that an engine starts the image with."""
        config: dict[str, Any] = json.loads(self("inspect", "--type=image", image))["Docker"]["config"]
        return config


def base_archive(folder: Path) -> Path:
    """Debian with Python as a tar file, made anew if this script is newer than the last one."""
    archive, root = folder / f"base-{RELEASE}.tar", folder / "base"
    if archive.exists() and archive.stat().st_mtime > Path(__file__).stat().st_mtime:
        return archive
    shutil.rmtree(root, ignore_errors=True)
    mirrors = run(
        "apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian"
    )
    packages = "--include=python3,python3-venv,python3-dev,ca-certificates"
    # In a mount namespace of its own, so that no mount outlives a failed run.
    run(
        "unshare",
        "--mount",
        "debootstrap",
        "--variant=minbase",
        packages,
        RELEASE,
        root,
        *mirrors.split()[:1],
    )
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    for cache in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(root / cache)
    part = archive.with_suffix(".part")
    run("tar", "--create", f"--file={part}", f"--directory={root}", "--exclude=./dev/*", ".")
    shutil.rmtree(root)
    return part.rename(archive)


def import_base(buildah: Buildah, archive: Path) -> None:
    container = buildah("from", "scratch")
    buildah("add", container, archive, "/")
    buildah("commit", "--quiet", "--rm", container, BASE)


def pip_settings() -> dict[str, str]:
    """This machine's pip settings about where packages are; the environment wins over files."""
    found = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if name in PIP_SETTINGS and (section == ":env:" or name not in found):
            found[name] = str(ast.literal_eval(value))
    return found


def pip_volumes(settings: dict[str, str], folder: Path) -> list[str]:
    """Mounts that give pip inside the build the same settings. Only empty mount points stay in the image."""
    file = configparser.RawConfigParser()
    file["global"] = settings
    with (folder / "pip.conf").open("w") as out:
        file.write(out)
    volumes = {f"{folder}/pip.conf:/etc/pip.conf:ro"}
    for word in " ".join(settings.values()).split():
        # An index's links lead to a folder beside it.
        path = Path(urlparse(word).path).parent if word.startswith("file:") else Path(word)
        if path.is_absolute() and path.exists():
            volumes.add(f"{path}:{path}:ro")
    return [f"--volume={each}" for each in sorted(volumes)]


def build(buildah: Buildah, base: str) -> None:
    sys.path.insert(0, str(ROOT))
    from ep_server import __version__

    revision = run("git", "-C", ROOT, "rev-parse", "HEAD").strip()
    arguments = [f"PYTHON_IMAGE={base}", f"VERSION={__version__}", f"REVISION={revision}"]
    settings = pip_settings()
    if settings.keys() & set(PIP_SOURCES):
        arguments.append("TORCH_INDEX=")  # this machine has its own place for packages
    flags = [*(f"--build-arg={each}" for each in arguments), *pip_volumes(settings, buildah.folder)]
    # Without --layers: this storage driver would copy all files once per instruction.
    buildah("bud", "--isolation=chroot", "--layers=false", "--format=docker", f"--tag={IMAGE}", *flags, ROOT)


class Server:
    """The image's entry point as process 1 of a container, with the image's environment and user."""

    def __init__(self, root: Path, config: dict[str, Any]) -> None:
        self.config = config
        arguments = (*config["Cmd"], f"--model={MODEL}", "--ranks=2", "--scheduler-kv-blocks=64")
        command = (*self._environment(), *config["Entrypoint"], *arguments)
        spaces = ("unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child")
        self.process = subprocess.Popen([*spaces, "bash", "-c", CONTAINER, "container", str(root), *command])

    def _environment(self) -> tuple[str, ...]:
        return ("/usr/bin/env", "-i", "-C", self.config["WorkingDir"], *self.config["Env"])

    def first_process(self) -> int:
        """The entry point's process id outside the container. Raises: SystemExit if the container ended."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        end = time.monotonic() + START_SECONDS
        while not (found := children.read_text().split()):
            expect("exit status of the starting container", self.process.poll(), None)
            expect(f"container started within {START_SECONDS} s", time.monotonic() < end, True)
            time.sleep(0.05)
        return int(found[0])

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container, as an engine's exec and its health probe do."""
        first = self.first_process()
        enter = ("nsenter", f"--target={first}", "--mount", "--net", "--pid", f"--root=/proc/{first}/root")
        line = (*enter, "--setuid=10001", "--setgid=10001", *self._environment(), *command)
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)

    def stop(self) -> int:
        """Sends SIGTERM. Returns: the exit status."""
        os.kill(self.first_process(), signal.SIGTERM)
        return self.process.wait(60)


def expect(what: str, actual: object, wanted: object) -> None:
    if actual != wanted:
        sys.exit(f"{what}: expected {wanted!r}, got {actual!r}")


def serve(root: Path, config: dict[str, Any]) -> None:
    """Serves the demo model. Checks health, an answer over gRPC, privileges and the exit on SIGTERM."""
    expect("user of the image", config["User"], "10001:10001")
    probe = config["Healthcheck"]["Test"][1:]
    server = Server(root, config)
    try:
        end = time.monotonic() + START_SECONDS
        while (health := server.execute(*probe)).returncode and time.monotonic() < end:
            expect("exit status of the starting server", server.process.poll(), None)
            time.sleep(0.5)
        expect(f"health {health.stderr}", health.stdout, "SERVING\n")
        answer = server.execute("ep-server", "generate", "12 + 30 =", "--temperature=0")
        expect(f"answer to 12 + 30 {answer.stderr}", answer.stdout.strip(), "42")
        version = server.execute("ep-server", "--version").stdout.split()[-1]
        expect("version label", config["Labels"]["org.opencontainers.image.version"], version)
        status = server.execute("/bin/grep", "-E", "^(Uid|CapEff|NoNewPrivs)", "/proc/1/status").stdout
        expect(
            "privileges", status.split(), ["Uid:", *["10001"] * 4, "CapEff:", "0" * 16, "NoNewPrivs:", "1"]
        )
        expect("exit status after SIGTERM", server.stop(), 0)
    finally:
        server.process.kill()
        server.process.wait(30)


def check_contents(root: Path) -> None:
    """The image has the native module and libfabric, but no compiler, sources, pip or CUDA part."""
    for pattern in (
        f"{ENVIRONMENT}/lib/python3.*/site-packages/ep_server/_C.*.so",
        "usr/lib/*/libfabric.so.1",
    ):
        expect(f"image has {pattern}", any(root.glob(pattern)), True)
    unwanted = ("usr/bin/g++*", "src", "wheels", "package", "opt/build")
    packages = (f"{ENVIRONMENT}/lib/*/site-packages/{each}" for each in ("pip", "ep_server/_cuda*.so"))
    for pattern in (*unwanted, *packages):
        expect(f"image has {pattern}", [str(path) for path in root.glob(pattern)], [])


def unpacked_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def compressed_layers(buildah: Buildah) -> list[int]:
    """Bytes of each layer that a registry stores and a client downloads, the base image's first."""
    out = buildah.folder / "oci"
    buildah("push", "--quiet", "--format=oci", IMAGE, f"oci:{out}:image")
    blobs = out / "blobs/sha256"
    index = json.loads((out / "index.json").read_text())
    manifest = json.loads((blobs / index["manifests"][0]["digest"].partition(":")[2]).read_text())
    shutil.rmtree(out)
    return [layer["size"] for layer in manifest["layers"]]


def report_sizes(buildah: Buildah, root: Path) -> None:
    """Prints the image's size and how much of it is torch and ep_server."""
    layers = compressed_layers(buildah)
    each = ", ".join(f"{size / 1e6:.0f}" for size in layers)
    print(f"image: {unpacked_bytes(root) / 1e6:.0f} MB")
    print(f"compressed: {sum(layers) / 1e6:.0f} MB in layers of {each} MB")
    for name in ("torch", "ep_server"):
        (folder,) = root.glob(f"{ENVIRONMENT}/lib/python3.*/site-packages/{name}")
        print(f"{name} in it: {unpacked_bytes(folder) / 1e6:.0f} MB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", help="pull this base image (name:tag or name:tag@digest) instead")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/image", help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep buildah's storage and the image in it")
    given = parser.parse_args(arguments)
    if os.geteuid() != 0:
        sys.exit("needs root: buildah and debootstrap mount file systems and change root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        sys.exit(f"missing: {', '.join(missing)}. Install with: scripts/system_packages --all")

    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    buildah = Buildah(folder)
    shutil.rmtree(folder / "storage", ignore_errors=True)
    try:
        if given.base is None:
            with step("base image"):
                import_base(buildah, base_archive(folder))
        with step("build"):
            build(buildah, given.base or BASE)
        root = Path(buildah("mount", buildah("from", IMAGE)))
        with step("serve the demo"):
            check_contents(root)
            serve(root, buildah.config(IMAGE))
        report_sizes(buildah, root)
    finally:
        if not given.keep:
            shutil.rmtree(folder / "storage", ignore_errors=True)


if __name__ == "__main__":
    main()
