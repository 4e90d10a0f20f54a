"""Measures a model at several concurrencies with `ep-server bench online` and reads its JSON.

    python examples/benchmark.py --model /path/to/checkpoint --ranks 4

Without --model it measures the demo model. Each run starts a server of its own; with --address the benchmark
uses a running one instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ep_server

DEMO = Path(ep_server.__file__).parent / "assets" / "demo_model"


def bench(concurrency: int, requests: int, server: list[str]) -> dict[str, Any]:
    """One run. The exit code is 1 if a request failed."""
    command = [sys.executable, "-m", "ep_server", "bench", "online", "--json", *server]
    command += [f"--concurrency={concurrency}", f"--requests={requests}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(DEMO), help="checkpoint directory")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--address", help="host:port of a running server")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=64)
    options = parser.parse_args()
    server = [f"--address={options.address}"] if options.address else []
    server = server or [f"--model={options.model}", f"--ranks={options.ranks}"]

    print(
        f"{'streams':>8} {'tokens/s':>10} {'TTFT p50':>10} {'TTFT p99':>10} {'ITL p50':>10} {'ITL p99':>10}"
    )
    for concurrency in options.concurrency:
        result = bench(concurrency, options.requests, server)
        first, gap = result["time_to_first_token"], result["inter_token_latency"]
        times = (1000 * each[name] for each in (first, gap) for name in ("p50", "p99"))
        row = "".join(f"{time:>8.1f} ms" for time in times)
        print(f"{concurrency:>8} {result['tokens_per_second']:>10,.0f}{row}")


if __name__ == "__main__":
    main()
