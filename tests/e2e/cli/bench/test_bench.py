"""`ep-server bench` as it is used: real ranks, real client processes, tokens counted."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ep_server
from ep_server.cli.bench import offline, online
from ep_server.cli.bench.breakdown import TIMED_EVERY, Rates
from ep_server.cli.bench.client_process import Work, run, started
from ep_server.cli.bench.command import rates
from ep_server.cli.bench.load import OK, Load
from ep_server.cli.bench.summary import Plan
from ep_server.cli.main import main
from ep_server.client import Target
from ep_server.config import Config
from ep_server.errors import InternalError, StartupError
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.frontend import MODEL, WAIT, serving
from tests.support.raw_client import RawClient

DEMO = Path(ep_server.__file__).parent / "assets" / "demo_model"
MANY = Load(requests=800, concurrency=700, rate=0.0, prompt_tokens=8, new_tokens=8)
LOAD = Load(requests=9, concurrency=4, rate=0.0, prompt_tokens=5, new_tokens=7, vocab_size=250)


def bench(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What it printed as JSON."""
    assert main(["bench", *arguments, "--json", "--set", "parallel.threads_per_rank=1"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_offline_on_two_ranks_with_made_up_weights(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shutil.copy(DEMO / "config.json", tmp_path)
    made_up = ("--model", str(tmp_path), "--load-format", "dummy", "--routing", "uniform", "--ranks", "2")
    lengths = ("--prompt-tokens", "6", "--new-tokens", "40", "--batch", "1,6", "--rounds", "2")
    file, chart = tmp_path / "found.json", tmp_path / "found.svg"
    made_up += ("--overlap", "on")
    found = bench(capfd, "offline", *made_up, *lengths, "--json-file", str(file), "--chart", str(chart))
    assert json.loads(file.read_text()) == found and chart.read_text().startswith("<svg ")
    assert (found["mode"], found["routing"], found["overlap"]) == ("offline", "uniform", "on")
    assert found["config"].items() >= {"parallel.ranks": 2, "model.load_format": "dummy"}.items()
    assert "model.dtype" not in found["config"]  # as by default
    for batch, result in zip((1, 6), found["batches"], strict=True):
        assert result["sequences_per_rank"] == batch and len(result["rounds"]) == 2
        assert all(each["direct"] > 0 and each["whole"] > 0 for each in result["rounds"])
        step = result["step"]
        assert step["tokens"] == pytest.approx(2 * batch, rel=0.1)
        assert sum(step["load"]) == pytest.approx(step["count"] * step["tokens"] * 4 * 3, rel=0.15)
        assert 0.85 < step["distinct_experts"] / step["distinct_expected"] < 1.15
        assert 1 <= step["rank_imbalance"] < 1.5 and 0 <= step["host_share"] <= 1
        assert step["overlapped"] == pytest.approx(1) and step["device"] is None
        assert set(step["bounds"]) == {"attention", "router", "dispatch", "experts", "combine", "sample"}
        # What is below nothing, two noisy runs apart, counts as nothing.
        assert min(step["phases"].values()) >= 0
        assert sum(step["phases"].values()) > 0.999 * step["seconds"]


def test_online_with_a_server_of_its_own(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chart = tmp_path / "found.svg"
    load = ("--requests", "11", "--concurrency", "4", "--new-tokens", "9", "--prompt-tokens", "6")
    goals = ("--slo-ttft-ms", "600000", "--slo-itl-ms", "600000", "--stream-interval", "4")
    own = ("--model", str(DEMO), "--ranks", "2", "--clients", "2", "--chart", str(chart))
    found = bench(capfd, "online", *own, *load, *goals)
    while found["steady_seconds"] is None:  # again: a busy machine kept a client from sending with the other
        found = bench(capfd, "online", *own, *load, *goals)
    assert (found["requests"], found["errors"], found["output_tokens"]) == (11, 0, 99)
    assert found["goodput"]["requests"] == 11 and found["statuses"] == {}
    assert found["tokens_per_message"] > 2  # 1, 4 and 4
    assert found["streams"] == 4 and 0 < found["steady_seconds"] < found["seconds"]
    assert 0 < found["step"]["host_share"] < 1 and found["config"]["parallel.threads_per_rank"] == 1
    assert chart.read_text().startswith("<svg ")


def test_rates_of_bounds() -> None:
    two = Config.from_values({"parallel.ranks": 2})
    assert rates(two, "cpu", 0.0, 0.0) == Rates(15e9, 15e9)
    assert rates(two, "cpu", 20.0, 0.0) == Rates(20e9, 20e9)
    assert rates(two, "", 0.0, 7.0) == Rates(15e9, 7e9)
    assert rates(two, "h200", 4500.0, 0.0) == Rates(4500e9, 375e9, packed=False)
    on_gpus = Config.from_values({"parallel.device": "cuda"})
    assert rates(on_gpus, "", 0.0, 0.0) == rates(two, "h200", 0.0, 0.0)


def test_a_server_of_its_own_has_room_and_is_for_this_host_alone() -> None:
    exposed = {"grpc.host": "0.0.0.0", "grpc.token_file": "tokens", "parallel.ranks": 3}
    made = online.prepared(Config.from_values(exposed), MANY)
    assert (made.grpc.host, made.grpc.port, made.grpc.token_file) == ("127.0.0.1", 0, "")
    assert (made.scheduler.max_running, made.scheduler.max_queue, made.grpc.max_streams) == (234, 700, 1024)
    same = online.prepared(made, replace(MANY, concurrency=1))
    assert same == made  # nothing becomes smaller


def test_gpus_time_some_of_the_steps_that_are_measured() -> None:
    """Offline, and in a server that is started to be measured."""
    ways = (partial(offline.prepared, plan=Plan((4,), 8, 8)), partial(online.prepared, load=MANY))
    for way in ways:
        for given, every in (({}, TIMED_EVERY), ({"metrics.device_phases": 5}, 5)):
            made = way(Config.from_values({"parallel.device": "cuda", **given}))
            assert made.metrics.device_phases == every
        assert way(Config.from_values({})).metrics.device_phases == 0


@pytest.mark.parametrize("readers", [1, 3])
async def test_every_request_is_asked_once(readers: int) -> None:
    async with serving() as served, started(readers) as processes:
        target = Target(served.server.address)
        done: list[int] = []
        async with asyncio.timeout(WAIT):
            traces = await online.send(LOAD, target, processes, 2, done.append)
        assert [trace.index for trace in traces] == list(range(9))
        assert all(trace.status == OK and trace.tokens == 7 for trace in traces)
        assert all(trace.planned <= trace.sent <= trace.arrivals[0][0] <= trace.ended for trace in traces)
        asked = [request.prompt_ids for request in served.ranks.requests.values()]
        assert len(asked) == len(set(asked)) == 9 + 2
        assert done[-1] == 9


@pytest.mark.parametrize(("rate", "in_flight"), [(1000.0, 9), (0.0, 4)])
async def test_a_late_server_slows_no_arrival(rate: float, in_flight: int) -> None:
    """Nothing is answered: all requests of an open loop come, of a closed one as many as it has streams."""
    async with serving() as served, RawClient(served.server.address) as client:
        served.ranks.hold()
        offsets = [index / rate for index in range(9)] if rate else []
        work = Work(Target(""), LOAD, range(9), offsets, LOAD.concurrency, ())
        running = asyncio.create_task(run(client, work, time.monotonic(), lambda: None))
        await served.until(lambda: len(served.ranks.requests) == in_flight)
        assert not running.done()
        served.ranks.release()
        assert all(trace.ok for trace in await running)
        assert len(served.ranks.requests) == 9


async def test_a_late_reader_hides_nothing() -> None:
    """Its requests should have gone 100 seconds ago: latencies say so."""
    async with serving() as served, RawClient(served.server.address) as client:
        begin = time.monotonic() - 100
        work = Work(Target(""), LOAD, range(9), [index / 10 for index in range(9)], 0, ())
        for index, trace in enumerate(await run(client, work, begin, lambda: None)):
            assert trace.planned == begin + index / 10 and trace.sent >= begin + 100
            assert trace.first_token is not None and trace.first_token >= 100 - index / 10


async def test_a_reader_that_dies_ends_the_benchmark() -> None:
    async with serving() as served:
        with pytest.raises(InternalError, match="a client process exited without a result"):
            async with started(2) as processes:
                served.ranks.hold()
                target = Target(served.server.address)
                running = asyncio.create_task(online.send(LOAD, target, processes))
                await served.until(lambda: len(served.ranks.requests) == 4)
                os.kill(processes[1].pid, signal.SIGKILL)
                await running


async def test_a_request_that_fails_offline_ends_the_run() -> None:
    """With the error of the request, whatever becomes of the others."""
    fake, plan = FakeRanks(2), Plan((3,), 5, 6, rounds=1)
    async with offline.running(Config(), MODEL, lambda *_: None, fake) as engine:
        fake.hold()
        running = asyncio.create_task(offline.measure(engine, MODEL, plan, 1, lambda: None))
        async with asyncio.timeout(WAIT):
            while len(fake.requests) < 6:
                await asyncio.sleep(0)
        assert [request.dp_rank for request in fake.requests.values()] == [0, 1] * 3
        fake.fail(2, "it broke")
        fake.release()
        with pytest.raises(InternalError, match="it broke"):
            await running


async def test_a_reader_that_cannot_start_is_named() -> None:
    async with started(1) as processes:
        target = Target("127.0.0.1:1", tls_ca="/no/such/file")
        with pytest.raises(StartupError, match="a client process could not start: FileNotFoundError"):
            await online.send(LOAD, target, processes)


def test_control_c_ends_all_processes_without_a_word(tmp_path: Path) -> None:
    """Sent to the whole group, as a terminal does, while a server of its own answers its clients."""
    heard = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a job behind & is deaf
    )
    run = "import runpy; runpy.run_module('ep_server', run_name='__main__', alter_sys=True)"
    command = [
        sys.executable,
        "-c",
        f"{heard}; {run}",
        "bench",
        "online",
        "--model",
        str(DEMO),
        "--requests",
        "100000",
    ]
    with (tmp_path / "err").open("w+b") as err:
        process = subprocess.Popen(command, stdout=err, stderr=err, start_new_session=True)
        try:
            begin = time.monotonic()
            while (
                b"warm-up: 1/1" not in (tmp_path / "err").read_bytes() and time.monotonic() < begin + 4 * WAIT
            ):
                time.sleep(0.05)
            time.sleep(0.3)  # for requests to be under way; sooner is right as well
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(WAIT) == 130
        finally:
            with suppress(ProcessLookupError):  # whoever is left would run for hours
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT)
        said = (tmp_path / "err").read_text()
    assert "warm-up: 1/1" in said and "Traceback" not in said and "error" not in said


async def test_why_a_request_failed_is_told() -> None:
    """What its caller was told, not the name of the status alone."""
    async with serving() as served, started(1) as processes:
        served.ranks.hold()
        target = Target(served.server.address)
        running = asyncio.create_task(online.send(LOAD, target, processes))
        await served.until(lambda: len(served.ranks.requests) == 4)
        served.ranks.fail(min(served.ranks.requests), "it broke")
        served.ranks.release()
        (failed,) = (trace for trace in await running if trace.status != OK)
        assert (failed.status, failed.why) == ("INTERNAL", "rank 0: it broke")


async def test_why_warm_up_requests_failed_is_told() -> None:
    """The reason, not that there were several."""
    async with serving() as served, started(1) as processes:
        target = Target(served.server.address)
        with pytest.raises(StartupError, match="could not start: InvalidArgument: stream_interval = 10995"):
            await online.send(replace(LOAD, stream_interval=1 << 40), target, processes, 2)
