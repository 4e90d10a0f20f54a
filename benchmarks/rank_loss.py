"""Loses ranks of a server under load, compares every output with an undisturbed run, and prints the pauses.

    python3 -m benchmarks.rank_loss --case kill --kills 200                  the demo model, 4 CPU ranks
    python3 -m benchmarks.rank_loss --case two --kills 48 --model 114m --shards 8
    python3 -m benchmarks.rank_loss --device cuda --kills 3                  random weights, a rank per GPU

Cases: `kill` one rank; `two` ranks 0.1 s apart; `again` one, and another process while the server recovers;
`stop` (SIGSTOP) one for longer than the hang timeout; `node` 1 of two, for streams at node 0. Every loss
waits until all ranks serve and every stream has gone on. Streams run all the time, each the next request
once one has ended, so losses hit prompts and outputs at any point. On CPU in float32 every output must equal
the undisturbed run to the last bit, on GPUs in length.

--shards N: N servers beside each other, each with its share of the losses, other seeds and --cores cores of
its own. Exit status 1: a stream ended with an error or another output, the server kept requests, KV blocks,
processes, descriptors or files, or it did not end well. Timings are printed only. Seconds.

A gap is the longest time between two tokens of a sequence from one loss to the next; of SIGSTOP, only what
is after the hang timeout. "undisturbed": the longest gap of each sequence under the same load before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.loss_server import Servers, given, of_streams, of_weights
from benchmarks.loss_streams import WORST, Load, Lost, gaps, undisturbed
from benchmarks.make_checkpoint import make_checkpoint
from ep_server.cli.chaos.faults import settled_pids
from ep_server.cli.chaos.report import quantiles
from ep_server.cli.chaos.streams import Asked, Lengths, draw_requests
from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.client import AsyncClient
from ep_server.errors import EpServerError

RECOVER_SECONDS, STANDBY_SECONDS = 300.0, 60.0
HANG_SECONDS = 3.0  # of the case `stop`; else so long that a busy machine looks like no hang
WARM = 0.1  # share of the losses before memory is first looked at
EVERY = 0.3  # mean seconds from one recovery to the next loss
UNDISTURBED = 10.0  # seconds of load before the first loss
Lists = dict[str, list[Any]]


class Losing:
    """Loses ranks of a server, one loss after the other."""

    def __init__(self, case: str, servers: Servers, load: Load, draw: random.Random) -> None:
        self.losses: list[Lost] = []
        self.returned: list[float] = []  # seconds from each loss until all ranks serve
        self._servers, self._load, self._client, self._draw = servers, load, load.client, draw
        cases: dict[str, Callable[[dict[int, int]], Awaitable[set[int]]]]
        cases = {"kill": self._kill, "two": self._two, "again": self._again, "stop": self._stop}
        self._lose, self._hang = {**cases, "node": self._node}[case], case == "stop"

    async def run(self, count: int) -> None:
        """So many losses. Raises: EpServerError, TimeoutError."""
        for _ in range(count):
            await asyncio.sleep(self._draw.expovariate(1 / EVERY))
            pids = await self.ready()
            at = time.monotonic()
            ranks = await self._lose(pids)
            self.losses.append(Lost(frozenset(ranks), at, at + HANG_SECONDS if self._hang else 0.0))
            await self.all_serve({pids[rank] for rank in ranks})
            self.returned.append(time.monotonic() - at)
            await self._load.resumed()

    async def ready(self) -> dict[int, int]:
        """As all_serve(), until the processes on standby have imported what they need too."""
        deadline = time.monotonic() + STANDBY_SECONDS
        while True:
            pids = await self.all_serve()
            if await self._servers.standby_idle(set(pids.values())) or time.monotonic() > deadline:
                return pids
            await asyncio.sleep(0.1)

    async def all_serve(self, gone: set[int] = frozenset()) -> dict[int, int]:  # type: ignore[assignment]
        """Until all ranks serve, none in one of these processes. Returns: their processes."""
        servers = self._servers
        async with asyncio.timeout(RECOVER_SECONDS):
            while True:
                info = await self._client.server_info()
                pids = {rank.rank: rank.pid for rank in info.rank_info}
                serve = len(pids) == servers.nodes * servers.ranks and info.live_nodes == servers.nodes
                if serve and not gone & set(pids.values()):
                    return await settled_pids(self._client, RECOVER_SECONDS)
                await asyncio.sleep(0.05)

    async def _kill(self, pids: dict[int, int]) -> set[int]:
        rank = self._draw.choice(sorted(pids))
        os.kill(pids[rank], signal.SIGKILL)
        return {rank}

    async def _two(self, pids: dict[int, int]) -> set[int]:
        ranks = self._draw.sample(sorted(pids), 2)
        os.kill(pids[ranks[0]], signal.SIGKILL)
        await asyncio.sleep(0.1)
        os.kill(pids[ranks[1]], signal.SIGKILL)
        return set(ranks)

    async def _again(self, pids: dict[int, int]) -> set[int]:
        """The second process may be a rank, on standby, or the one that takes the place of the first."""
        ranks = await self._kill(pids)
        await asyncio.sleep(self._draw.uniform(0.0, 2.0))
        second = self._draw.choice(self._servers.ranks_of())
        with suppress(psutil.NoSuchProcess):
            second.kill()
        return ranks | {rank for rank, pid in pids.items() if pid == second.pid}

    async def _stop(self, pids: dict[int, int]) -> set[int]:
        rank = self._draw.choice(sorted(pids))
        os.kill(pids[rank], signal.SIGSTOP)
        return {rank}

    async def _node(self, pids: dict[int, int]) -> set[int]:
        """Starts the node again once the others serve without it."""
        self._servers.kill(1)
        async with asyncio.timeout(RECOVER_SECONDS):
            while (await self._client.server_info()).live_nodes > 1:
                await asyncio.sleep(0.05)
        await asyncio.sleep(self._draw.uniform(0.5, 2.0))
        self._servers.start(1)
        return {rank for rank in pids if rank >= self._servers.ranks}


async def left(client: AsyncClient) -> list[str]:
    """What the server still holds though no stream is open."""
    found = ["nothing was looked at"]
    for _ in range(300):
        loads = await client.loads()
        found = [f"{loads.in_flight} requests"] if loads.in_flight else []
        found += [
            f"rank {each.rank}: {each.running} running, {each.waiting} waiting, {each.kv_blocks_used} blocks"
            for each in loads.ranks
            if each.running or each.waiting or each.kv_blocks_used
        ]
        if not found:
            break
        await asyncio.sleep(0.1)
    return found


async def lose(args: argparse.Namespace, servers: Servers) -> dict[str, Any]:
    """One case against servers that have started. Returns: a row of figures and problems."""
    draw = random.Random(args.seed)
    async with AsyncClient(servers.address) as client:
        model = await client.model_info()
        lengths = Lengths((16, 512), args.new_tokens)
        asked = draw_requests(draw, args.streams, lengths, model.vocab_size, has_text=model.has_tokenizer)
        # Half of the prompts run anew each time: a loss finds some in prefill.
        changed = [{"bypass_prefix_cache": True}, {}] if args.device == "cpu" else [{"stream_interval": 4}]
        asked = [Asked(a.prompt_ids, {**a.fields, **changed[n % len(changed)]}) for n, a in enumerate(asked)]
        load = Load(client, asked, args.device == "cpu", draw)
        losing = Losing(args.case, servers, load, draw)
        await losing.ready()
        began = time.monotonic()
        await load.once()
        alone = time.monotonic() - began
        load.begin()
        await asyncio.sleep(UNDISTURBED)
        early = max(1, round(args.kills * WARM))
        row = await _losses(load, losing, early, servers)
        before_any = undisturbed(load, losing.losses[0].at) if losing.losses else []
        before = servers.held()
        load.begin()
        row["problems"] += (await _losses(load, losing, args.kills - early, servers))["problems"]
        after = servers.held()
        row["problems"] += [f"left: {line}" for line in [*await left(client), *after.leaks(before)]]
    found, worst = gaps(load, losing.losses, servers.moves())
    return row | {
        "case": args.case,
        "model": args.model,
        "seconds_alone": alone,
        "losses": len(losing.losses),
        "streams": len(load.answers),
        "gaps": {"undisturbed": before_any, **found},
        "worst": worst,
        "phases": {**servers.phases(), "all ranks serve": losing.returned},
        "held": [asdict(before), asdict(after)],
        "machine_load": os.getloadavg()[0],
    }


async def _losses(load: Load, losing: Losing, count: int, servers: Servers) -> dict[str, Any]:
    """So many under load, until the streams have ended and all processes are there again."""
    problems: list[str] = []
    try:
        await losing.run(count)
    except (EpServerError, TimeoutError) as error:
        problems.append(f"no recovery from loss {len(losing.losses)}: {error!r}")
    await load.end()
    problems, load.problems = problems + load.problems, []
    with suppress(TimeoutError, EpServerError):
        await losing.ready()
    return {"problems": problems}


def settings(args: argparse.Namespace) -> dict[str, object]:
    """Of the server."""
    found: dict[str, object] = {"parallel.device": args.device, "model.path": str(checkpoint(args.model))}
    if args.device == "cpu":
        hang = HANG_SECONDS if args.case == "stop" else 60.0
        found |= {"model.dtype": "float32", "exchange.reduction": "source", "exchange.timeout_seconds": hang}
        found["scheduler.kv_blocks"] = 2048
    else:
        found |= of_streams(args.streams)
    return found | of_weights(checkpoint(args.model)) | given(args.set)


def checkpoint(model: str) -> Path:
    """The folder of a model: `demo`, `114m`, which is made once, or a path."""
    if model == "demo":
        return DEMO_MODEL
    folder = Path("build/qwen3-114m")
    if model == "114m" and not (folder / "config.json").exists():
        make_checkpoint(folder)
    return folder if model == "114m" else Path(model)


def run_one(args: argparse.Namespace) -> dict[str, Any]:
    """One server, all losses."""
    nodes = 2 if args.case == "node" else 1
    standby = 1 if args.case in ("kill", "stop") else 2
    servers = Servers(nodes, args.ranks // nodes, settings(args), standby, args.log)
    try:
        for node in range(nodes):
            servers.start(node)
        asyncio.run(servers.until_served())
        row = asyncio.run(lose(args, servers))
    finally:
        wrong = servers.stop()
    return {**row, "problems": row["problems"] + wrong}


def run_shards(args: argparse.Namespace) -> dict[str, Any]:
    """Servers beside each other, each on cores of its own. Returns: one row of all."""
    cores, own = sorted(os.sched_getaffinity(0)), []
    for shard in range(args.shards):
        mine = [cores[(shard * args.cores + n) % len(cores)] for n in range(args.cores)]
        kills = args.kills // args.shards + (shard < args.kills % args.shards)
        command = [sys.executable, "-m", "benchmarks.rank_loss"]
        changed = {"shards": 1, "kills": kills, "seed": args.seed + shard, "log": f"{args.log}.{shard}"}
        for name, value in {**vars(args), **changed, "json": f"{args.log}.{shard}.json"}.items():
            for each in value if isinstance(value, list) else [value]:
                command += [f"--{name.replace('_', '-')}", str(each)]
        os.sched_setaffinity(0, mine)  # the new process inherits it
        own.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    os.sched_setaffinity(0, cores)
    rows = []
    for shard, process in enumerate(own):
        process.wait()
        with suppress(OSError, ValueError):
            rows.append(json.loads(Path(f"{args.log}.{shard}.json").read_text()))
    return merged(rows, [f"{args.shards - len(rows)} servers gave no figures"] * (len(rows) < args.shards))


def merged(rows: Sequence[dict[str, Any]], problems: list[str]) -> dict[str, Any]:
    """Figures of several servers as one."""

    def join(name: str) -> Lists:
        found: Lists = {}
        for row in rows:
            for key, values in row[name].items():
                found.setdefault(key, []).extend(values)
        return found

    def total(name: str) -> list[Any]:
        return [each for row in rows for each in row[name]]

    sums = {name: sum(row[name] for row in rows) for name in ("losses", "streams")}
    most = {name: max((row[name] for row in rows), default=0.0) for name in ("seconds_alone", "machine_load")}
    same = {name: rows[0][name] if rows else "" for name in ("case", "model")}
    problems = problems + total("problems")
    return {
        **same,
        **sums,
        **most,
        "problems": problems,
        "held": total("held"),
        "worst": total("worst"),
        "gaps": join("gaps"),
        "phases": join("phases"),
    }


def show(row: dict[str, Any]) -> None:
    """Prints a row."""
    counts = f"{row['losses']} losses, {row['streams']} streams, load average {row['machine_load']:.1f}"
    print(f"{row['model']}, {row['case']}: {counts}, all streams once alone {row['seconds_alone']:.1f} s")
    lists = {f"longest gap, {name}": values for name, values in row["gaps"].items()} | row["phases"]
    for name, values in lists.items():
        if values:
            q = quantiles(values)
            figures = f"p50 {q['p50']:.3f}   p99 {q['p99']:.3f}   most {q['max']:.3f} s"
            print(f"  {name:28} {len(values):6}   {figures}")
    for number, (before, after) in enumerate(zip(row["held"][::2], row["held"][1::2], strict=True)):
        changes = ", ".join(f"{name} {before[name]:.0f} -> {after[name]:.0f}" for name in before)
        print(f"  held by server {number}: {changes}")
    for line in sorted(row["worst"], key=lambda line: -float(line.split()[0]))[:WORST]:
        print(f"  {line}")
    for problem in row["problems"]:
        print(f"  WRONG {problem}")
    print("  FAILED" if row["problems"] else "  every output equals that of the undisturbed run")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=("kill", "two", "again", "stop", "node"), default="kill")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--model", default="", help="demo, 114m, or a folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2, help="of a shard")
    parser.add_argument("--set", action="append", default=[], help="SECTION.FIELD=VALUE of the server")
    parser.add_argument("--log", type=Path, default=Path("build/rank_loss"), help="prefix of the logs")
    parser.add_argument("--json", type=Path, help="writes all figures to a file")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    args.model = args.model or ("demo" if cpu else "benchmarks/shapes/qwen3-30b-a3b")
    args.ranks = args.ranks or (4 if cpu else 2)
    args.streams = args.streams or (64 if cpu else 128)
    args.new_tokens = args.new_tokens or (256 if cpu else 2048)
    args.log.parent.mkdir(parents=True, exist_ok=True)
    checkpoint(args.model)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    row = run_shards(args) if args.shards > 1 else run_one(args)
    show(row)
    if args.json:
        args.json.write_text(json.dumps(row))
    return int(bool(row["problems"]))


if __name__ == "__main__":
    sys.exit(main())
