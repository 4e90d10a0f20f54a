"""Where the process of a rank imports from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ep_server
from ep_server.ranks.process import import_path

ROOT = Path(ep_server.__file__).parents[1]
# A front that found its own ep_server, then stands where another one lies.
FRONT = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
import ep_server.ranks.launcher as launcher
from ep_server.config import Config
from tests.support.ranks.rank_group import Recorder
os.chdir({cwd!r})
sys.path.insert(0, "")

async def main():
    values = {{"model.path": {model!r}, "parallel.ranks": 1, "parallel.threads_per_rank": 1,
              "scheduler.kv_blocks": 8}}
    ranks = launcher.RankProcesses(Config.from_values(values))
    (ready,) = await ranks.start(Recorder(), lambda *_: None)
    print("ready", ready.rank)
    await ranks.stop()

asyncio.run(main())
"""


def test_an_ep_server_in_the_working_directory_is_not_taken(tmp_path: Path) -> None:
    for decoy in ("ep_server/__init__.py", "ep_server/ranks/life.py", "json.py", "torch.py"):
        file = tmp_path / decoy
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise SystemExit('the decoy ran')\n")
    model = str(ROOT / "ep_server" / "assets" / "demo_model")
    front = FRONT.format(root=str(ROOT), cwd=str(tmp_path), model=model)
    done = subprocess.run(
        [sys.executable, "-P", "-c", front],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready 0\n", "")


def test_import_path_is_absolute_and_holds_our_root_once(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [entry for entry in sys.path if Path(entry).is_absolute() and entry != str(ROOT)]
    monkeypatch.setattr(sys, "path", ["", "relative", *others])
    assert import_path() == [str(ROOT), *others]
    monkeypatch.setattr(sys, "path", [*others, ".", str(ROOT)])
    assert import_path() == [*others, str(ROOT)]
