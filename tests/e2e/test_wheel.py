"""What a wheel holds, built from nothing but the tracked files with what is installed here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, without what a build in the tree has left."""
    copy = tmp_path_factory.mktemp("sources")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # one that is removed but not committed so is listed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_holds_all_that_a_server_needs(sources: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*line, "-w", str(tmp_path), str(sources)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = sources / "ep_server"
    ours = {
        path.relative_to(sources).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix in (".py", ".json", ".safetensors", ".html")
    }
    assert {"ep_server/__main__.py", "ep_server/assets/demo_model/model.safetensors"} <= ours
    assert ours | {"ep_server/py.typed", "ep_server/_C.pyi"} <= names
    (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    assert {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= names
    modules = {name.partition(".")[0]: name for name in names if name.endswith(".so")}
    assert set(modules) - {"ep_server/_cuda"} == {"ep_server/_C"}  # the former where nvcc is found
    native = modules["ep_server/_C"]
    # Nothing else: no test, no source of the native module.
    assert {name.partition("/")[0] for name in names} == {"ep_server", info}
    assert {Path(name).suffix for name in names} & {".cpp", ".hpp", ".inc"} == set()

    unpacked = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    command = "import sys; sys.path.insert(0, sys.argv[1]); import ep_server._C as c; print(c.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", command, str(unpacked)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(unpacked / native)
