"""Kills a prefill server and ranks of both sides of a hand-off under load; compares every stream.

    python3 benchmarks/handoff_losses.py --kills 200 --shards 8        ranks on CPU, in parts at once
    python3 benchmarks/handoff_losses.py --device cuda --kills 3 --ranks 1 1

Each shard starts a prefill and a decode server and runs `ep-server chaos --prefill` against them. Losses are,
in turn, of a rank of either server and of the prefill server itself, which is started again here. A stream
must be that of the decode server without hand-off: to the last bit on CPU, of the same length on GPUs, whose
sums round differently from step to step. No server may hold a request or KV block at the end. Exit status 1
otherwise.

Ranks on CPU serve the demo model. On GPUs, random weights of a config.json in benchmarks/shapes, or --model.
Units: seconds, MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.handoff_ttft import ROOT, write_shape
from ep_server.cli.demo.run import DEMO_MODEL

START_SECONDS = 300.0
STOP_SECONDS = 30.0
ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Shard:
    """One pair of servers. cores: for all of its processes."""

    number: int
    kills: int
    cores: Sequence[int]
    ports: tuple[int, int]  # of the prefill and the decode server
    model: Path
    logs: Path

    def log(self, role: str) -> Path:
        """Of a server, or of `chaos`."""
        return self.logs / f"{self.number}-{role}.log"

    async def start(self, role: str, line: Sequence[str], environment: dict[str, str]) -> Any:
        """`ep-server` with these arguments, on this shard's cores."""
        with self.log(role).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ep_server", *line),
                stdout=asyncio.subprocess.PIPE if role == "chaos" else log,
                stderr=log,
                env=environment,
                preexec_fn=lambda: os.sched_setaffinity(0, self.cores),
            )


def serve_line(options: argparse.Namespace, shard: Shard, role: str) -> list[str]:
    number = ROLES.index(role)
    settings: dict[str, Any] = {
        "model": shard.model,
        "port": shard.ports[number],
        "ranks": options.ranks[number],
        "metrics-port": 0,
        "handoff-role": role,
        "handoff-hold-seconds": 5,
        "parallel-device": options.device,
        "scheduler-block-size": (16, 8)[number] if options.device == "cpu" else 16,
        "resilience-max-losses": 10_000,
        "resilience-rank-losses": 0,
        "resilience-standby": options.standby,
    }
    if options.device == "cpu":
        settings |= {
            "model-dtype": "float32",
            "exchange-reduction": "source",
            "exchange-timeout-seconds": 5,
            "parallel-threads-per-rank": 1,
            "scheduler-max-step-tokens": 32,
        }
    else:
        settings |= {
            "model-max-context": max(options.prompt) + options.new_tokens,
            "scheduler-kv-blocks": options.streams * (max(options.prompt) + options.new_tokens) // 8,
            "scheduler-max-running": 2 * options.streams,
            "scheduler-max-step-tokens": 2048,
        }
        settings |= {} if options.model else {"load-format": "dummy"}
    return ["serve", *(f"--{name}={value}" for name, value in settings.items()), *options.set]


def environment_of(options: argparse.Namespace, role: str) -> dict[str, str]:
    path = f"{ROOT}:{os.environ['PYTHONPATH']}" if os.environ.get("PYTHONPATH") else str(ROOT)
    first = 0 if role == "prefill" else options.ranks[0]
    gpus = range(first, first + options.ranks[ROLES.index(role)]) if role in ROLES else ()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(gpu) for gpu in range(sum(options.ranks))]
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus)}


async def until_served(options: argparse.Namespace, shard: Shard, role: str, server: Any) -> None:
    """Raises: SystemExit if the server ends or takes too long."""
    end = time.monotonic() + START_SECONDS
    while b" serving " not in shard.log(role).read_bytes():
        if server.returncode is not None or time.monotonic() > end:
            raise SystemExit(shard.log(role).read_text(errors="replace")[-4000:])
        await asyncio.sleep(0.2)


async def supervised(options: argparse.Namespace, shard: Shard, server: Any) -> None:
    """Starts the prefill server again whenever it ends. Ends the last one if it is cancelled."""
    try:
        while True:
            await server.wait()
            server = await shard.start(
                "prefill", serve_line(options, shard, "prefill"), environment_of(options, "prefill")
            )
    except asyncio.CancelledError:
        await ended(server)


async def ended(server: Any) -> None:
    if server.returncode is None:
        server.terminate()
        try:
            await asyncio.wait_for(server.wait(), STOP_SECONDS)
        except TimeoutError:
            server.kill()
            await server.wait()


@asynccontextmanager
async def serving(options: argparse.Namespace, shard: Shard) -> AsyncIterator[None]:
    servers = [
        await shard.start(role, serve_line(options, shard, role), environment_of(options, role))
        for role in ROLES
    ]
    supervisor = None
    try:
        for role, server in zip(ROLES, servers, strict=True):
            await until_served(options, shard, role, server)
        supervisor = asyncio.create_task(supervised(options, shard, servers.pop(0)))
        yield
    finally:
        if supervisor is not None:
            supervisor.cancel()
            await supervisor
        for server in servers:
            await ended(server)


async def lose(options: argparse.Namespace, shard: Shard) -> dict[str, Any]:
    """The report of `ep-server chaos`."""
    prefill, decode = (f"127.0.0.1:{port}" for port in shard.ports)
    line = ["chaos", "--json", "--address", decode, "--prefill", prefill, "--faults", str(shard.kills)]
    line += ["--kind", "kill", "--kind", "server", "--every", str(options.every), "--seed", str(shard.number)]
    line += ["--streams", str(options.streams), "--max-new-tokens", str(options.new_tokens)]
    line += ["--prompt-tokens", *map(str, options.prompt), "--recover-seconds", str(options.recover_seconds)]
    async with serving(options, shard):
        chaos = await shard.start("chaos", line, environment_of(options, "chaos"))
        output, _ = await chaos.communicate()
    if not output.strip():
        raise SystemExit(shard.log("chaos").read_text(errors="replace")[-4000:])
    report: dict[str, Any] = json.loads(output)
    print_report(shard, report)
    return report


def print_report(shard: Shard, report: dict[str, Any]) -> None:
    print(
        f"shard {shard.number}: {'good' if report['good'] else 'BAD'}, {report['faults']}, "
        f"{report['streams']} streams ({report['same_tokens']} with the same tokens, {report['handed_off']} "
        f"handed off), memory {report['memory_mib'][0]:.0f} -> {report['memory_mib'][1]:.0f} MiB"
    )
    shown = {"recovery": report["recovery_seconds"]}
    shown |= {f"longest gap, {name}": values for name, values in report["longest_gap_seconds"].items()}
    shown |= {f"first token, {name}": values for name, values in report["first_token_seconds"].items()}
    for name, values in shown.items():
        if values:
            print(f"  {name:<28}" + "".join(f"  {key} {value:7.3f}" for key, value in values.items()))
    for kind in ("errors", "differences", "left"):
        for each in report[kind]:
            print(f"  {kind}: {each}")
    sys.stdout.flush()


def free_ports(count: int) -> list[int]:
    """All different; free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def shards_of(options: argparse.Namespace, model: Path, logs: Path) -> list[Shard]:
    cores, ports = sorted(os.sched_getaffinity(0)), free_ports(2 * options.shards)
    found = []
    for number in range(options.shards):
        own = cores[number * len(cores) // options.shards : (number + 1) * len(cores) // options.shards]
        kills = options.kills // options.shards + (number < options.kills % options.shards)
        found.append(
            Shard(
                number,
                kills,
                own or [cores[number % len(cores)]],
                (ports[2 * number], ports[2 * number + 1]),
                model,
                logs,
            )
        )
    return [shard for shard in found if shard.kills]


async def run(options: argparse.Namespace, model: Path, logs: Path) -> bool:
    """Returns: whether no stream was lost."""
    began = time.monotonic()
    reports = await asyncio.gather(
        *(lose(options, shard) for shard in shards_of(options, model, logs)), return_exceptions=True
    )
    failed = [report for report in reports if isinstance(report, BaseException)]
    for error in failed:
        print(f"FAILED: {error!r}")
    whole = [report for report in reports if not isinstance(report, BaseException)]
    total = {
        name: sum(report[name] if isinstance(report[name], int) else len(report[name]) for report in whole)
        for name in ("streams", "same_tokens", "handed_off", "errors", "differences", "left")
    }
    kills = {kind: sum(report["faults"][kind] for report in whole) for kind in ("kill", "server")}
    print(f"in all: ranks and servers killed {kills}, {total}, {time.monotonic() - began:.0f} s")
    return not failed and all(report["good"] for report in whole)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, help="a checkpoint, instead of the demo model or a shape")
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="on GPUs: its random weights")
    parser.add_argument("--layers", type=int, default=0, help="of the shape; 0: all")
    parser.add_argument(
        "--ranks", type=int, nargs=2, default=(2, 2), help="of the prefill, the decode server"
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--shards", type=int, default=1, help="pairs of servers beside each other")
    parser.add_argument("--streams", type=int, default=12, help="of a shard at once")
    parser.add_argument(
        "--prompt", type=int, nargs=2, help="fewest and most tokens; 16 180, on GPUs 512 4096"
    )
    parser.add_argument("--new-tokens", type=int, help="60, on GPUs 512")
    parser.add_argument("--every", type=float, default=2.0, help="mean seconds between losses of a server")
    parser.add_argument("--recover-seconds", type=float, default=300.0)
    parser.add_argument("--standby", type=int, default=1, help="resilience.standby of both servers")
    parser.add_argument("--set", action="append", default=[], help="more arguments of ep-server serve")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    options = parser.parse_args()
    on_gpus = options.device == "cuda"
    options.prompt = options.prompt or ((512, 4096) if on_gpus else (16, 180))
    options.new_tokens = options.new_tokens or (512 if on_gpus else 60)
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        model = options.model or DEMO_MODEL
        if on_gpus and options.model is None:
            context = max(options.prompt) + options.new_tokens
            model = write_shape(Path(folder), options.shape, options.layers, context=context)
        return 0 if asyncio.run(run(options, model, logs)) else 1


if __name__ == "__main__":
    sys.exit(main())
