"""The process of a rank: where it imports from, and how its end is seen."""

from __future__ import annotations

import asyncio
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ep_server
from ep_server.ranks import process
from ep_server.ranks.process import RankCallbacks, RankProcess, code_at_end, import_path

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


def test_an_end_is_seen_before_the_process_is_reaped() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1
    )
    assert process.stdout is not None
    process.stdout.readline()
    assert code_at_end(process.pid) is None
    process.kill()
    until(lambda: code_at_end(process.pid) == -signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    process.stdout.close()
    assert code_at_end(process.pid) is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of a system call")
def test_a_process_runs_while_one_of_its_threads_does() -> None:
    """Here the first one has ended."""
    program = """
import ctypes, os, threading, time
def other():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    os.write(1, b"alone\\n")
    time.sleep(600)
threading.Thread(target=other).start()
ctypes.CDLL(None).syscall(60, 7)  # exit of this thread
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"alone\n"
    assert code_at_end(process.pid) is None
    process.kill()
    until(lambda: code_at_end(process.pid) is not None)
    process.wait(30)
    process.stdout.close()


async def test_a_spawn_that_is_cancelled_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hears of its end, which may come when another process has its rank."""
    made: list[Any] = []
    start = process.subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> Any:
        made.append(start(*arguments, **options))
        return made[0]

    monkeypatch.setattr(process, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))
    heard: list[int] = []
    callbacks = RankCallbacks(
        lambda rank, frame: None, lambda rank, why: heard.append(rank), lambda rank, code: heard.append(rank)
    )
    spawning = asyncio.ensure_future(RankProcess.spawn(0, "ep_server.ranks.life", (), callbacks, 60.0))
    await asyncio.sleep(0)
    assert len(made) == 1 and not spawning.done()
    spawning.cancel()
    await asyncio.wait((spawning,))
    assert spawning.cancelled()
    async with asyncio.timeout(30):
        while made[0].returncode is None:
            await asyncio.sleep(0.01)
    assert made[0].returncode == -signal.SIGKILL and not heard


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
