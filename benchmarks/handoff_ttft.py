"""Time to first token of a prompt that a prefill server computes and a decode server continues.

    python3 benchmarks/handoff_ttft.py [--device cuda] [--shape qwen3-30b-a3b] [--prompt 8192] [--rounds 7]

Two servers run as processes, on GPUs 0 and 1 of this host. Weights are random, of a config.json in
benchmarks/shapes. Every round has a new prompt and measures, from the call to the first token:

    prefill alone   at the prefill server
    plain           at the decode server, which computes the prompt itself
    hand-off        from the decode server, with blocks that move while the prefill server computes them
    one by one      the same, but the decode server is called when the prefill has ended, as gateways do

Tokens of `plain` and of both hand-offs are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ep_server.client import AsyncClient, AsyncStream, PrefillDecode
from ep_server.models.families import read_spec

ROOT = Path(__file__).parents[1]
SHAPES = Path(__file__).parent / "shapes"
START_SECONDS = 300.0
TOKENS = 8  # of an output


def write_shape(folder: Path, shape: str, layers: int = 0, dtype: str = "", context: int = 0) -> Path:
    """A model without weights: a config.json in benchmarks/shapes, changed. Returns: its folder."""
    values = json.loads((SHAPES / shape / "config.json").read_text())
    if layers:
        values["num_hidden_layers"] = layers
    if dtype:
        values["torch_dtype"] = values["dtype"] = dtype
    values["max_position_embeddings"] = max(values["max_position_embeddings"], context)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@asynccontextmanager
async def serving(options: argparse.Namespace, model: Path) -> AsyncIterator[list[str]]:
    """The addresses of the prefill and the decode server, which start at the same time."""
    gpus = {"prefill": 0, "decode": 1} if options.device == "cuda" else {"prefill": 0, "decode": 0}
    logs = {role: model / f"{role}.log" for role in gpus}
    processes = {role: started(options, model, role, gpu, logs[role]) for role, gpu in gpus.items()}
    try:
        yield [await address(processes[role], logs[role]) for role in gpus]
    finally:
        for process in processes.values():
            process.terminate()
        for role, process in processes.items():
            process.wait(30)
            if options.logs:
                print(logs[role].read_text(), file=sys.stderr)


def started(
    options: argparse.Namespace, model: Path, role: str, gpu: int, log: Path
) -> subprocess.Popen[bytes]:
    length = options.prompt + TOKENS
    line = [sys.executable, "-m", "ep_server", "serve", "--model", str(model), "--load-format", "dummy"]
    line += ["--port", "0", "--metrics-port", "0", "--handoff-role", role, "--ranks", str(options.ranks)]
    line += ["--parallel-device", options.device, "--model-max-context", str(length)]
    line += ["--scheduler-block-size", str(options.block_size if role == "decode" else 16)]
    line += ["--scheduler-max-step-tokens", str(options.step), "--scheduler-kv-blocks", str(length // 4)]
    line += ["--scheduler-max-running", "8", "--resilience-standby", "0", *options.set]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    with log.open("wb") as output:
        return subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, env=environment)


async def address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where a server serves, once it does."""
    end = time.monotonic() + START_SECONDS
    while (found := re.search(r"serving \S+ on (\S+:\d+),", log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(log.read_text()[-3000:])
        await asyncio.sleep(0.1)
    return found[1]


async def first_token(stream: AsyncStream, since: float) -> tuple[float, list[int], int]:
    """(seconds to the first token, all tokens, prompt tokens that were not computed)."""
    seconds = 0.0
    async for _ in stream:
        seconds = seconds or time.perf_counter() - since
    finished = stream.output.finished
    assert finished is not None
    return seconds, stream.output.token_ids, finished.usage.cached_tokens


async def measure(options: argparse.Namespace, model: Path) -> dict[str, list[float]]:
    vocabulary, draws = read_spec(model).vocab_size, random.Random(1)
    fields: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    fields["bypass_prefix_cache"] = True
    found: dict[str, list[float]] = {"prefill alone": [], "plain": [], "hand-off": [], "one by one": []}
    async with (
        serving(options, model) as (first, second),
        AsyncClient(first) as prefill,
        AsyncClient(second) as decode,
        PrefillDecode(first, decode, handle_seconds=60) as pair,
    ):
        for number in range(options.rounds + 1):  # the first one warms up
            prompt = [draws.randrange(3, vocabulary) for _ in range(options.prompt)]
            times, tokens = {}, {}
            since = time.perf_counter()
            one = {**fields, "max_new_tokens": 1}
            times["prefill alone"], _, _ = await first_token(prefill.generate(prompt, **one), since)
            since = time.perf_counter()
            times["plain"], tokens["plain"], _ = await first_token(decode.generate(prompt, **fields), since)
            since = time.perf_counter()
            stream = await pair.generate(prompt, **fields)
            times["hand-off"], tokens["hand-off"], cached = await first_token(stream, since)
            since = time.perf_counter()
            held = prefill.generate(prompt, hold_kv=True, **one)
            handle = (await held.read()).kv_handle
            stream = decode.generate(prompt, kv_handle=handle, **fields)
            times["one by one"], tokens["one by one"], later = await first_token(stream, since)
            most = options.prompt - 1
            if {cached, later} != {most}:
                print(f"{number}: {cached} and {later} of {most} tokens were handed off", flush=True)
                continue
            same = [tokens[name] == tokens["plain"] for name in ("hand-off", "one by one")]
            if not all(same) and options.device == "cpu":
                raise SystemExit(f"tokens differ: {tokens}")
            shown = {name: round(value, 4) for name, value in times.items()}
            print(number, shown, "same tokens:", same, flush=True)
            if number:
                for name, value in times.items():
                    found[name].append(value)
    return found


def table(found: dict[str, Sequence[float]]) -> None:
    if not found["hand-off"]:
        raise SystemExit("no prompt was handed off: see --logs")
    base = statistics.median(found["prefill alone"])
    print(
        f"{'from the call to the first token':<34}{'median, s':>10}{'least':>9}{'most':>9}{'/ prefill':>11}"
    )
    for name, values in found.items():
        median = statistics.median(values)
        print(f"{name:<34}{median:10.4f}{min(values):9.4f}{max(values):9.4f}{median / base:11.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to first token with and without a hand-off.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: as the shape")
    parser.add_argument("--dtype", default="", help="of the model; empty: as the shape")
    parser.add_argument("--ranks", type=int, default=1, help="of each server")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens")
    parser.add_argument("--step", type=int, default=2048, help="scheduler.max_step_tokens")
    parser.add_argument("--block-size", type=int, default=16, help="of the decode server")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--set", nargs="*", default=[], help="more arguments of ep-server serve")
    parser.add_argument("--logs", action="store_true", help="print the servers' logs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    longest = options.prompt + TOKENS
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(Path(folder), options.shape, options.layers, options.dtype, longest)
        found = asyncio.run(measure(options, model))
    table(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
