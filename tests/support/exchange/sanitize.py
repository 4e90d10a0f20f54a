"""The exchange on two GPUs under compute-sanitizer: memcheck, then synccheck, a sanitizer to each rank.

Eight tokens, deadlines of minutes; halves apart and fused, FP8 and BF16, every view, INDEX views given back
unread, both reductions, weights at combine, low-precision rows, odd sizes. Results are checked as well.

    python3 -m tests.support.exchange.sanitize [tool ...]    exit status 0: no findings, all results right
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, TOKENS, FOUND = 2, 8, 86
TIMEOUT_NS = 300 * 10**9
SECONDS = 220  # for one tool
ROUTINGS = ("max_tokens", "dropped")


def program(rank: int, folder: str) -> int:
    """Everything that one rank runs. Returns how many pairs were checked."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    from tests.support.exchange import gpu_wires

    group = dist.group.WORLD
    pairs = sum(views_and_reductions(group, *case) for case in cases())
    gpu_wires.late_weights(group, TIMEOUT_NS)
    for wire in gpu_wires.STEPS:
        gpu_wires.low_precision(group, wire, TIMEOUT_NS)
    dist.barrier()
    return pairs


def cases() -> list[tuple[object, object, object]]:
    """(shape, payload, reduction)."""
    from ep_server.exchange.api import Payload, Reduction
    from tests.support.exchange.conformance import UNEVEN, Shape

    spread = tuple(e % 4 for e in range(32))
    shapes = (
        (Shape(TOKENS, 129, 3, UNEVEN), Payload.BF16),
        (Shape(TOKENS, 2048, 8, spread), Payload.BF16),
        (Shape(TOKENS, 640, 8, spread), Payload.FP8),
        (Shape(TOKENS, 1024, 16, spread), Payload.FP8_UE8M0),
    )
    return [(shape, payload, reduction) for shape, payload in shapes for reduction in Reduction]


def views_and_reductions(group: dist.ProcessGroup, shape: object, payload: object, reduction: object) -> int:
    """Pairs of one exchange; the count of them."""
    from ep_server.exchange.api import View
    from tests.support.exchange.conformance import run_pair
    from tests.support.exchange.gpu_group import close_exchange, on_gpu, open_exchange
    from tests.support.exchange.on_gpu import OnGpu
    from tests.support.exchange.routing import make_inputs

    spec = replace(shape.spec(group.rank(), RANKS, payload, reduction), timeout_ns=TIMEOUT_NS)
    exchange, pairs = open_exchange(group, spec), 0
    for fused in (False, True):
        for seed, routing in enumerate(ROUTINGS):
            for view in View:
                run_pair(OnGpu(exchange, fused=fused), routing, seed, view)
                pairs += 1
            mine = make_inputs(spec, routing, seed)[spec.rank]
            exchange.release(exchange.dispatch(*on_gpu(mine), View.INDEX))
    close_exchange(exchange)
    return pairs


def sanitizer() -> str:
    """Its path."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("compute-sanitizer", path=f"{home}/bin:{os.environ['PATH']}")
    if found is None:
        raise SystemExit("compute-sanitizer is neither in CUDA_HOME nor in PATH")
    return found


def run_tool(tool: str) -> list[str]:
    """What went wrong under one tool, a text for each rank that failed."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all",
            "--launch-timeout", "120", "--print-limit", "20",
            "--report-api-errors", "no",  # torch asks the driver what it may refuse
        ]  # fmt: skip
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(RANKS)]
        ranks = []
        for rank, log in enumerate(logs):
            command = [
                sanitizer(),
                *options,
                sys.executable,
                "-m",
                "tests.support.exchange.sanitize",
                "--rank",
                str(rank),
                "--folder",
                folder,
            ]
            with log.open("w") as out:
                ranks.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
        end = wait_all(ranks)
        return [
            f"{tool}, rank {rank}: {'killed after' if code is None else 'exit status'} {code or SECONDS}\n"
            + log.read_text()[-6000:]
            for rank, (code, log) in enumerate(zip(end, logs, strict=True))
            if code != 0 or "ERROR SUMMARY: 0 errors" not in log.read_text()
        ]


def wait_all(ranks: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit statuses; None where the deadline passed. Once one rank fails the others have little time left."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and any(each.poll() is None for each in ranks):
        if any(each.poll() for each in ranks):
            deadline = min(deadline, time.monotonic() + 10)
        time.sleep(0.2)
    codes = [each.poll() for each in ranks]
    for each in ranks:
        if each.poll() is None:
            each.kill()
        each.wait()
    return codes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tools", nargs="*", default=["memcheck", "synccheck"])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        print(
            f"rank {given.rank}: {program(given.rank, given.folder)} pairs and the forms of combine are right"
        )
        return
    if torch.cuda.device_count() < RANKS:
        raise SystemExit(f"{RANKS} GPUs are needed, here are {torch.cuda.device_count()}")
    failed = 0
    for tool in given.tools:
        began, problems = time.monotonic(), run_tool(tool)
        failed += bool(problems)
        print(*problems, sep="\n", end="")
        print(f"{tool}: {'ERRORS' if problems else 'clean'}, {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
