"""`make test` sets up what a machine lacks: scripts/system_packages, with an apt-get that only records."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "system_packages"
TOOLS = ("bash", "dirname", "rm", "python3")  # that it runs itself, and that are always there


def ran(
    folder: Path, *present: str, apt: str = "exit 0", user: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """On a machine with these commands alone. user: the command that runs it as somebody else.

    Returns: how it ended, and what apt-get was called with.
    """
    commands, root = folder / "commands", folder / "root" / "scripts"
    commands.mkdir()
    root.mkdir(parents=True)
    shutil.copy(SCRIPT, root)  # it may remove the stamp of the tree it lies in
    (folder / "root" / ".venv").mkdir()
    stamp(folder).touch()
    for name in (*TOOLS, *present):
        found = shutil.which(name)
        assert found is not None
        (commands / name).symlink_to(found)
    (commands / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{apt}\n')
    (commands / "apt-get").chmod(0o755)
    done = subprocess.run(
        [*user, root / SCRIPT.name], env={"PATH": str(commands)}, capture_output=True, text=True, check=False
    )
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def stamp(folder: Path) -> Path:
    """What make takes for a build; gone where something was installed, so that it builds again."""
    return folder / "root" / ".venv" / ".installed"


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("packages are installed by root")


def test_what_is_missing_is_installed(root: None, tmp_path: Path) -> None:
    done, calls = ran(tmp_path, "make", "openssl")
    assert done.returncode == 0, done.stderr
    assert calls[0].startswith("update")
    assert calls[1].startswith("install -y") and {"g++", "iproute2"} <= set(calls[1].split())
    assert not stamp(tmp_path).exists()
    assert not {"make", "openssl", "prometheus", "chromium"} & set(calls[1].split())


def test_without_network_packages_are_named_and_tests_go_on(root: None, tmp_path: Path) -> None:
    done, _ = ran(tmp_path, "make", "openssl", apt="exit 100")
    assert done.returncode == 0
    assert stamp(tmp_path).exists()
    assert "could not be installed: " in done.stderr and "iproute2" in done.stderr


def test_lists_that_cannot_be_renewed_are_used_as_they_are(root: None, tmp_path: Path) -> None:
    done, calls = ran(tmp_path, "make", apt='[ "$1" != update ]')
    assert done.returncode == 0, done.stderr
    assert calls[1].startswith("install -y") and "could not be installed" not in done.stderr
    assert not stamp(tmp_path).exists()


def test_apt_asks_nobody_and_has_deadlines(root: None, tmp_path: Path) -> None:
    _, calls = ran(tmp_path, "make", apt='[ "$DEBIAN_FRONTEND" = noninteractive ] || exit 1')
    assert not stamp(tmp_path).exists(), "apt-get failed: it would have asked"
    assert all("Acquire::http::Timeout=" in call and "DPkg::Lock::Timeout=" in call for call in calls)


def test_without_root_packages_are_named_and_nothing_runs(root: None, tmp_path: Path) -> None:
    """In a user namespace without a mapping this process is nobody."""
    done, calls = ran(tmp_path, "make", "unshare", user=("unshare", "--user"))
    if done.returncode == 1 and "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert "not here: " in done.stderr and "iproute2" in done.stderr
    assert not calls and stamp(tmp_path).exists()
