"""Kills ranks of a server on GPUs under load and prints how long streams pause, and where the time goes.

    python -m benchmarks.gpu_rank_loss --ranks 2 --streams 128 --faults 3

Random weights of a shape, or a checkpoint with --model. Each rank needs a GPU. The gaps are those of
`ep-server chaos`; the phases are those of the server's log.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

SHAPE = "benchmarks/shapes/qwen3-30b-a3b"
START_SECONDS, CHAOS_SECONDS = 200, 400
SHOWN = ("recovery: ", "recovered after", "lost", "start again", "expert slots", "waiting to be", "ERROR")


def serve(asked: argparse.Namespace, log: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "ep_server",
        "serve",
        "--model",
        asked.model,
        "--ranks",
        str(asked.ranks),
    ]
    command += ["--port", str(asked.port)]
    if asked.model == SHAPE:
        command += ["--load-format", "dummy", "--routing", "uniform"]
    settings: dict[str, object] = {
        "parallel.device": "cuda",
        "scheduler.max_running": asked.streams,
        "scheduler.max_step_tokens": 2048,
        "scheduler.max_queue": 4096,
        "grpc.max_streams": 4096,
        "resilience.max_losses": 1000,
    }
    settings |= dict(text.split("=", 1) for text in asked.set)
    for name, value in settings.items():
        command += ["--" + name.replace(".", "-").replace("_", "-"), str(value)]
    return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)


def wait_until_served(server: subprocess.Popen[bytes], asked: argparse.Namespace, log: Path) -> None:
    health = [sys.executable, "-m", "ep_server", "health", "--address", f"127.0.0.1:{asked.port}"]
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run(health, capture_output=True, check=False).returncode:
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server does not serve:\n{log.read_text()[-4000:]}")
        time.sleep(1)


def chaos(asked: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "ep_server", "chaos", "--address", f"127.0.0.1:{asked.port}", "--json"]
    command += ["--faults", str(asked.faults), "--streams", str(asked.streams), "--every", "3"]
    command += ["--prompt-tokens", "64", "512", "--max-new-tokens", str(asked.new_tokens)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=CHAOS_SECONDS, check=False)
    if not ended.stdout.strip():
        print(ended.stderr[-4000:])
        return 1
    report = json.loads(ended.stdout)
    for name, value in report.items():
        print(f"{name}: {value}")
    return ended.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=SHAPE)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=2048)
    parser.add_argument("--port", type=int, default=50077)
    parser.add_argument("--set", action="append", default=[], help="SECTION.FIELD=VALUE of the server")
    parser.add_argument("--log", type=Path, default=Path("rank_loss.log"))
    asked = parser.parse_args()
    began = time.monotonic()
    server = serve(asked, asked.log)
    try:
        wait_until_served(server, asked, asked.log)
        print(f"served after {time.monotonic() - began:.1f} s")
        status = chaos(asked)
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
    for line in asked.log.read_text(errors="replace").splitlines():
        if any(word in line for word in SHOWN):
            print(line)
    return status


if __name__ == "__main__":
    sys.exit(main())
