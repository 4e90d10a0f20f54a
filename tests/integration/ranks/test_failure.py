"""What becomes of a group of real processes when one, or their parent, is killed, stopped or broken."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import uvloop
from safetensors.torch import load_file, save_file

from ep_server.config import Config
from ep_server.errors import StartupError
from ep_server.ranks.board import LaunchTiming
from ep_server.ranks.launcher import RankProcesses
from ep_server.records import LossCause
from tests.support.models.checkpoints import Tiny
from tests.support.ranks.rank_group import Leftovers, Recorder, alive, greedy, rank_config

ODD = "tests.support.ranks.odd_rank"
# Hang timeouts, seconds: the second one if a busy machine has held up a process for as long as the first.
HANGS = (2.0, 12.0)
QUICK = LaunchTiming(start_stall=60.0, grace=0.2, term=0.2)


@asynccontextmanager
async def group(config: Config, **options: Any) -> AsyncIterator[tuple[RankProcesses, Recorder]]:
    ranks, heard = RankProcesses(config, **options), Recorder()
    try:
        await ranks.start(heard, heard.on_progress)
        yield ranks, heard
    finally:
        await ranks.stop()


@asynccontextmanager
async def busy_group(config: Config) -> AsyncIterator[tuple[RankProcesses, Recorder]]:
    """A group in the middle of a long request on rank 0."""
    async with group(config) as (ranks, heard):
        ranks.submit(0, greedy(1, (1, 2, 3), 150))
        await heard.until(lambda: len(heard.tokens.get(1, [])) > 2 or heard.lost)
        yield ranks, heard


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_killed_rank_is_noticed_and_all_end(
    tiny: Tiny, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def kill() -> None:
        async with busy_group(rank_config(tiny.path, 2)) as (ranks, heard):
            os.kill(ranks.pids[1], signal.SIGKILL)
            await heard.until(lambda: heard.lost)
            ranks.submit(0, greedy(2, (1,), 1))
            ranks.cancel(1, 2)
        assert heard.lost == [(1, "killed by SIGKILL")]
        assert heard.causes == [(1, LossCause.SIGNAL)]
        assert alive(ranks.pids) == []

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.sleep(0))  # uvloop keeps a pipe for the whole process
    before = Leftovers()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(kill())
    assert Leftovers().new_since(before) == {}


async def test_a_bug_in_a_step_is_reported_by_the_rank_that_has_it(
    tiny: Tiny, capfd: pytest.CaptureFixture[str]
) -> None:
    """A token outside the vocabulary, which the front never lets pass: the peer's abort is only an echo."""
    async with busy_group(rank_config(tiny.path, 2)) as (ranks, heard):
        ranks.submit(1, greedy(2, (10**6,), 5))
        await heard.until(lambda: heard.lost)
    assert heard.lost == [(1, "IndexError: index out of range in self")]
    assert heard.causes == [(1, LossCause.EXCEPTION)]
    assert "Traceback" in capfd.readouterr().err


async def test_the_traceback_of_a_bug_is_written_before_the_kill(
    tiny: Tiny, capfd: pytest.CaptureFixture[str]
) -> None:
    async with group(rank_config(tiny.path, 1), module="tests.support.ranks.late_log_rank") as (ranks, heard):
        ranks.submit(0, greedy(1, (10**6,), 5))
        await heard.until(lambda: heard.lost)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("ranks", [2, 4])
async def test_a_stopped_rank_is_named_not_one_that_waits(tiny: Tiny, ranks: int) -> None:
    """Wherever it stops, in a vote or amid a step: whoever waited in vain says so, and is not to blame."""
    stopped = ranks - 2 or 1
    for _ in range(3):
        for seconds in HANGS:
            config = rank_config(tiny.path, ranks, exchange__timeout_seconds=seconds)
            async with busy_group(config) as (group_, heard):
                with suppress(psutil.NoSuchProcess):  # another was held up and lost, and all have ended
                    psutil.Process(group_.pids[stopped]).suspend()
                group_.submit(0, greedy(2, (1, 2, 3), 150))  # the first one may have ended
                await heard.until(lambda heard=heard: heard.lost)
            ((rank, message),) = heard.lost
            if rank == stopped:
                break
        assert rank == stopped
        waited = rf"timed out in \S+ waiting for peer {stopped}: "
        assert re.search(f"{waited}|was stopped by a signal", message), message
        assert "\n" not in message


@pytest.mark.parametrize("ranks", [1, 3])
async def test_a_rank_stopped_while_idle_is_noticed_in_time(tiny: Tiny, ranks: int) -> None:
    for seconds in HANGS:
        config = rank_config(tiny.path, ranks, exchange__timeout_seconds=seconds)
        async with group(config) as (processes, heard):
            processes.submit(0, greedy(1, (1, 2, 3), 3))
            await heard.parked(ranks, 1)
            with suppress(psutil.NoSuchProcess):  # as above
                psutil.Process(processes.pids[-1]).suspend()
            await heard.until(lambda heard=heard: heard.lost, seconds=30.0)
        ((rank, message),) = heard.lost
        if rank == ranks - 1:
            break
    assert rank == ranks - 1
    silent = f"did not answer for {seconds:g} s while it had nothing to do"
    assert re.match(f"{silent}|was stopped by a signal", message)


async def test_a_rank_alone_stopped_amid_work_is_noticed(tiny: Tiny) -> None:
    """No peer waits for it. One that goes on in time is not lost."""
    for seconds in HANGS:
        config = rank_config(tiny.path, 1, exchange__timeout_seconds=seconds)
        async with busy_group(config) as (processes, heard):
            process = psutil.Process(processes.pids[0])
            process.suspend()
            processes.submit(0, greedy(2, (1, 2, 3), 150))  # the first one may have ended
            await asyncio.sleep(seconds / 4)
            with suppress(psutil.NoSuchProcess):  # this process was held up for longer
                process.resume()
            await heard.until(lambda heard=heard: len(heard.tokens.get(2, [])) > 2 or heard.lost)
            if heard.lost:
                continue
            process.suspend()
            processes.submit(0, greedy(3, (1, 2, 3), 150))
            await heard.until(lambda heard=heard: heard.lost)
            break
    assert heard.lost == [(0, f"was stopped by a signal for more than {seconds:g} s")]
    assert heard.causes == [(0, LossCause.HANG)]
    assert 2 in heard.tokens


async def test_an_idle_rank_that_hangs_is_lost(tiny: Tiny) -> None:
    """Its process lives, its loop does not come back."""
    for seconds in (0.5, 12.0):
        config = rank_config(tiny.path, 2, model__name="hangs", exchange__timeout_seconds=seconds)
        async with group(config, module=ODD, timing=QUICK) as (_, heard):
            await heard.until(lambda heard=heard: heard.lost)
        if heard.lost[0][0] == 1:
            break
    assert heard.lost == [(1, f"did not answer for {seconds:g} s while it had nothing to do")]


async def test_work_longer_than_the_deadline_is_no_hang(tiny: Tiny) -> None:
    """A process that has work does not look at its channel before it is done."""
    for seconds in (0.5, 6.0):  # the second one if the process was held up while idle
        config = rank_config(tiny.path, 1, model__name="busy", exchange__timeout_seconds=seconds)
        async with group(config, module=ODD, timing=QUICK) as (ranks, heard):
            await asyncio.sleep(2 * seconds)  # idle: it answers
            for number in (1, 2):
                ranks.submit(0, greedy(number, (1,), 1))
                await heard.until(lambda n=number, heard=heard: n in heard.freed or heard.lost)
                await asyncio.sleep(2 * seconds)
        if not heard.lost:
            break
    assert heard.lost == []


async def test_what_a_rank_said_explains_its_exit(tiny: Tiny) -> None:
    """The message and the exit both arrive before the loss is reported."""
    config = rank_config(tiny.path, 2, model__name="times-out")
    for settle in (1.0, 12.0):  # the second one if a process was held up for as long as the first
        async with group(config, module=ODD, timing=LaunchTiming(settle=settle)) as (ranks, heard):
            processes = list(ranks._board.processes.values())
            ranks.submit(0, greedy(1, (1, 2, 3), 1))
            await heard.until(lambda heard=heard: heard.lost)
            exits = [process.returncode for process in processes]
        if exits == [1, 1]:
            break
    assert exits == [1, 1]
    ((rank, message),) = heard.lost
    assert message.startswith(f"rank {1 - rank} timed out in dispatch/recv_header")


async def test_a_stopped_rank_only_delays(tiny: Tiny) -> None:
    await stop_and_continue(tiny, seconds=1.0)


@pytest.mark.slow
async def test_a_rank_stopped_for_three_seconds_only_delays(tiny: Tiny) -> None:
    await stop_and_continue(tiny, seconds=3.0)


async def stop_and_continue(tiny: Tiny, seconds: float) -> None:
    async with busy_group(rank_config(tiny.path, 2)) as (ranks, heard):
        psutil.Process(ranks.pids[1]).suspend()
        ranks.submit(1, greedy(2, tiny.prompts[0], 64))
        ranks.submit(0, greedy(3, (1, 2, 3), 150))  # the first one may have ended
        await asyncio.sleep(seconds)
        assert 2 not in heard.finished
        assert 3 not in heard.finished
        psutil.Process(ranks.pids[1]).resume()
        await heard.until(lambda: {1, 2, 3} <= set(heard.finished))
    assert tuple(heard.tokens[2]) == tiny.tokens[0]
    assert heard.lost == []


def test_ranks_die_with_a_launcher_that_is_killed(tiny: Tiny) -> None:
    before = Leftovers()
    config = json.dumps(rank_config(tiny.path, 2).values())
    command = [sys.executable, "-m", "tests.support.ranks.launch_and_wait", config]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = json.loads(launcher.stdout.readline())
        handles = [psutil.Process(pid) for pid in pids]
        launcher.kill()
        _, left = psutil.wait_procs(handles, timeout=60)
    assert left == []
    assert len(pids) == 2
    assert Leftovers().new_since(before) == {}


async def started(config: Config, **options: Any) -> str:
    """The one line that a failing start gives; nothing is left of it."""
    before = Leftovers()
    ranks, heard = RankProcesses(config, **options), Recorder()
    with pytest.raises(StartupError) as caught:
        await ranks.start(heard, heard.on_progress)
    await ranks.stop()
    assert Leftovers().new_since(before) == {}
    assert heard.lost == []
    message = str(caught.value)
    assert "\n" not in message
    return f"{type(caught.value).__name__}: {message}"


def copied(tiny: Tiny, path: Path) -> Path:
    return Path(shutil.copytree(tiny.path, path / "model"))


async def test_start_names_a_missing_file(tiny: Tiny, tmp_path: Path) -> None:
    path = copied(tiny, tmp_path)
    (path / "model.safetensors").unlink()
    message = await started(rank_config(path, 2))
    assert message.startswith("CheckpointError: ")
    assert str(path) in message


async def test_a_start_without_free_descriptors_is_no_bug(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("ep_server.ranks.process.subprocess.Popen", no_process)
    message = await started(rank_config(tiny.path, 2))
    expected = "StartupError: the processes of the ranks cannot be started: [Errno 24] Too many open files"
    assert message == expected


async def test_start_names_an_unknown_architecture(tiny: Tiny, tmp_path: Path) -> None:
    path = copied(tiny, tmp_path)
    config = json.loads((path / "config.json").read_text())
    config.update(model_type="gpt2", architectures=["GPT2LMHeadModel"])
    (path / "config.json").write_text(json.dumps(config))
    message = await started(rank_config(path, 2))
    assert message.startswith("CheckpointError: ")
    assert "'gpt2': unknown architecture" in message


async def test_start_says_what_does_not_fit(tiny: Tiny) -> None:
    message = await started(rank_config(tiny.path, 2, scheduler__kv_blocks=100_000_000))
    assert message.startswith("StartupError: the model does not fit: 0.00 GiB of weights")
    assert "of KV cache" in message


async def test_start_names_a_field_out_of_range(tiny: Tiny) -> None:
    message = await started(rank_config(tiny.path, 2, exchange__payload="fp8"))
    assert message.startswith("ConfigError: hidden = 64: must be a multiple of 128")
    message = await started(rank_config(tiny.path, 2, model__max_context=10_000))
    assert message.startswith("ConfigError: model.max_context = 10000: must be at most")


async def test_a_rank_that_fails_while_loading_says_why(tiny: Tiny, tmp_path: Path) -> None:
    """An expert of the second rank has a wrong shape: only that rank reads it."""
    path = copied(tiny, tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in sorted(tensors, reverse=True) if ".experts.5." in n)
    tensors[name] = torch.zeros(3, 5)
    save_file(tensors, file)
    message = await started(rank_config(path, 2))
    assert message.startswith("CheckpointError: rank 1: ")
    assert name in message


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("exits", "StartupError: rank 0: ended with exit code 7"),
        ("garbage", "StartupError: rank 0: sent a malformed message"),
        ("closes", "StartupError: rank 0: closed its channel"),
        ("silent", "StartupError: ranks [0] reported nothing for 1 s while starting"),
    ],
)
async def test_a_process_that_is_no_rank(tiny: Tiny, fault: str, expected: str) -> None:
    config = rank_config(tiny.path, 1, model__name=fault)
    timing = replace(QUICK, start_stall=1.0) if fault == "silent" else QUICK
    message = await started(config, module=ODD, timing=timing)
    assert message.startswith(expected)


async def test_a_missing_module(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    message = await started(rank_config(tiny.path, 1), module="no_such_module_of_ours")
    assert message == "StartupError: rank 0: ended with exit code 1"
    assert "no_such_module_of_ours" in capfd.readouterr().err


async def test_garbage_from_a_running_rank_ends_the_group(tiny: Tiny) -> None:
    config = rank_config(tiny.path, 2, model__name="garbage-later")
    async with group(config, module=ODD) as (ranks, heard):
        ranks.submit(0, greedy(1, (1,), 1))
        await heard.until(lambda: heard.lost)
    assert len(heard.lost) == 1
    assert heard.lost[0][1].startswith("sent a malformed message")


async def test_stop_ends_a_rank_that_does_not_listen(tiny: Tiny) -> None:
    before = Leftovers()
    config = rank_config(tiny.path, 2, model__name="deaf")
    async with group(config, module=ODD, timing=QUICK) as (ranks, heard):
        await asyncio.gather(ranks.stop(), ranks.stop())
    assert alive(ranks.pids) == []
    assert heard.lost == []
    assert Leftovers().new_since(before) == {}


async def test_a_cancelled_start_leaves_nothing(tiny: Tiny) -> None:
    before = Leftovers()
    config = rank_config(tiny.path, 2, model__name="silent")
    ranks, heard = RankProcesses(config, module=ODD), Recorder()
    start = asyncio.create_task(ranks.start(heard, heard.on_progress))
    async with asyncio.timeout(30):
        while len(ranks.pids) < 2:
            await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert alive(ranks.pids) == []
    assert Leftovers().new_since(before) == {}


async def test_stop_before_start(tiny: Tiny) -> None:
    await RankProcesses(rank_config(tiny.path, 2)).stop()


async def test_a_group_stopped_amid_its_work_ends_in_order(tiny: Tiny) -> None:
    """Requests run on both ranks when the order to stop comes; no rank calls that an error."""
    amid = False
    while not amid:  # again if they ended before the order came
        ranks, heard = RankProcesses(rank_config(tiny.path, 2)), Recorder()
        await ranks.start(heard, heard.on_progress)
        for number in (1, 2):
            ranks.submit(number - 1, greedy(number, (5, 6, 7), 150))
        await heard.until(lambda heard=heard: len(heard.tokens) == 2)
        processes = list(ranks._board.processes.values())
        await ranks.stop()
        assert [process.returncode for process in processes] == [0, 0]
        assert heard.lost == []
        amid = heard.finished == []
