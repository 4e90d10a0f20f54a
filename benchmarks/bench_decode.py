"""Decode throughput on the CPU beside transformers (and llama.cpp where installed): one run, one checkpoint.

Checked before anything is timed: in float32 our tokens equal transformers' for every prompt of the largest
batch, on every layout of ranks. Then, in bfloat16, per batch size: tokens = batch * new tokens, all requests
submitted at once, greedy, no EOS; seconds from the first submit to the last token, prefill included; each
engine's best of --rounds rounds. Step times are the gaps between one rank's token messages.
Bytes of a step: bfloat16 weights that must be read once, 2 * (attention + router + head + distinct experts
of a layer * 3 * H * I); distinct experts as for uniform routing, 32 * (1 - (1 - 4 / 32) ** batch). The bound
is those bytes over this machine's read bandwidth, measured in the same run with all threads.

    python benchmarks/bench_decode.py [--checkpoint DIR] [--batches 1,8,32] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.make_checkpoint import Shape, make_checkpoint
from benchmarks.rank_rounds import generate, group
from ep_server.records import RankStatistics

CHECKED_TOKENS = 16
LAYOUTS = ((1, 2), (2, 1))  # ranks, threads of each


def peers(checkpoint: Path, work: dict[str, Any]) -> dict[str, Any]:
    """Runs benchmarks/decode_peers.py in a process of its own and returns its answer."""
    command = [sys.executable, str(Path(__file__).with_name("decode_peers.py")), str(checkpoint)]
    done = subprocess.run(command, input=json.dumps(work), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{work['engine']}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


async def check(checkpoint: Path, prompts: list[list[int]]) -> None:
    """float32 tokens must be those of transformers. Raises: SystemExit at the first that differs."""
    work = {"engine": "transformers", "implementation": "eager", "dtype": "float32", "threads": 2}
    expected = peers(checkpoint, {**work, "prompts": prompts, "new": CHECKED_TOKENS, "rounds": 1})["tokens"]
    distinct = len({token for row in expected for token in row})
    for ranks, threads in LAYOUTS:
        async with group(checkpoint, ranks, threads, "float32") as (processes, on):
            await generate(processes, on, prompts, CHECKED_TOKENS)
            got = [on.tokens[number] for number in sorted(on.tokens)]
        if got != expected:
            wrong = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
            raise SystemExit(
                f"R={ranks}: prompt {wrong}: {got[wrong]}, expected {expected[wrong]}; nothing was timed"
            )
    print(
        f"check: float32, {len(prompts)} prompts x {CHECKED_TOKENS} tokens ({distinct} distinct ids) equal "
        f"transformers' on R = {', '.join(str(r) for r, _ in LAYOUTS)}\n"
    )


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def host_share(before: dict[int, RankStatistics], after: dict[int, RankStatistics]) -> dict[str, float]:
    """Share of the steps' time that plan, vote and publish took, over all ranks."""
    names = ("plan", "vote", "publish", "total")
    spent = {
        name: sum(
            after[r].sums[f"step/{name}"] - (before[r].sums.get(f"step/{name}", 0) if r in before else 0)
            for r in after
        )
        for name in names
    }
    return {name: spent[name] / spent["total"] for name in names[:3]}


async def ours(
    checkpoint: Path, layout: tuple[int, int], batches: dict[int, list[list[int]]], args: Any
) -> dict:
    """Best round per batch: seconds, tokens, step times, host share."""
    results: dict[int, dict[str, Any]] = {}
    async with group(checkpoint, *layout, "bfloat16") as (processes, on):
        await generate(processes, on, batches[max(batches)], 8)
        for batch, prompts in batches.items():
            for _ in range(args.rounds):
                before = dict(on.statistics)
                seconds = await generate(processes, on, prompts, args.new)
                steps = on.times[0]
                gaps = [b - a for a, b in pairwise(steps)]
                if batch not in results or seconds < results[batch]["seconds"]:
                    results[batch] = {
                        "seconds": seconds,
                        "tokens": [on.tokens[n] for n in sorted(on.tokens)],
                        "gaps": gaps,
                        "host": host_share(before, on.statistics),
                    }
    return results


def read_bandwidth(threads: int) -> float:
    """Bytes per second of summing 1 GiB that lies in no cache, best of 8."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(1 << 28)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def equal_prefix(ours: list[list[int]], theirs: list[list[int]]) -> str:
    same = sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True))
    return f"{same}/{len(ours)}"


def hardware() -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}, commit {commit or '?'}"
    )


async def run(args: argparse.Namespace, checkpoint: Path) -> bool:
    import torch

    from ep_server import _C

    shape, sizes = Shape(), [int(b) for b in args.batches.split(",")]
    generator = torch.Generator().manual_seed(args.seed)
    prompts = torch.randint(shape.vocabulary - 1, (max(sizes), args.prompt), generator=generator).tolist()
    batches = {size: prompts[:size] for size in sizes}
    bandwidth = read_bandwidth(2)
    print(
        f"{hardware()}; kernels {_C.compute_isas()[0]}; read {bandwidth / 1e9:.0f} GB/s; "
        f"torch {torch.__version__}"
    )
    print(
        f"{shape.parameters() / 1e6:.1f} M parameters, prompt {args.prompt}, {args.new} new, seed {args.seed}"
    )
    await check(checkpoint, prompts)

    engines: dict[str, dict[int, dict[str, Any]]] = {}
    for ranks, threads in LAYOUTS:
        engines[f"ep_server R={ranks} x {threads}"] = await ours(checkpoint, (ranks, threads), batches, args)
    others = [("transformers", i) for i in args.implementations.split(",")] + [("llama.cpp", "")]
    for engine, implementation in others:
        work = {"engine": engine, "implementation": implementation, "dtype": "bfloat16", "threads": 2}
        for size, batch in batches.items():
            answer = peers(
                checkpoint, {**work, "prompts": batch, "new": args.new, "rounds": args.peer_rounds}
            )
            if "missing" in answer:
                print(answer["missing"])
                break
            engines.setdefault(f"{engine} {implementation}".strip(), {})[size] = answer
    return report(engines, sizes, shape, bandwidth, args)


def report(
    engines: dict[str, dict[int, dict[str, Any]]], sizes: list[int], shape: Shape, bandwidth: float, args
) -> bool:
    """Prints one table per batch; True if ours is twice transformers at 8 and 32 and the host share holds."""
    good = True
    for size in sizes:
        bytes_read = 2 * shape.read_per_step(shape.expected_experts(size))
        print(f"batch {size}: {bytes_read / 1e6:.0f} MB a step, bound {bytes_read / bandwidth * 1e3:.2f} ms")
        rate = {name: size * args.new / of[size]["seconds"] for name, of in engines.items() if size in of}
        baseline = max((n for n in rate if n.startswith("transformers")), key=rate.__getitem__)
        best = max((n for n in rate if n.startswith("ep_server")), key=rate.__getitem__)
        for name, value in rate.items():
            result = engines[name][size]
            line = f"  {name:26s} {value:8.0f} tok/s  {value / rate[baseline]:6.2f} x"
            if "gaps" in result:
                gaps, host = result["gaps"], result["host"]
                shares = ", ".join(f"{part} {100 * share:.1f}" for part, share in host.items())
                line += (
                    f"  step p50 {quantile(gaps, 0.5) * 1e3:.2f} p99 {quantile(gaps, 0.99) * 1e3:.2f} ms"
                    f"  host {100 * sum(host.values()):.1f} % ({shares})"
                )
            if name != baseline:
                line += f"  first tokens {equal_prefix(result['tokens'], engines[baseline][size]['tokens'])}"
            print(line)
        ratio = rate[best] / rate[baseline]
        verdict = "" if size < 8 else f"  (must: >= 2 x: {'yes' if ratio >= 2 else 'NO'})"
        print(f"  {best} is {ratio:.2f} x {baseline}{verdict}")
        good = good and (size < 8 or ratio >= 2)
        if size == 32:
            share = sum(engines[best][size]["host"].values())
            print(
                f"  plan + vote + publish {100 * share:.1f} % of a step "
                f"(must: <= 5 %: {'yes' if share <= 0.05 else 'NO'})"
            )
            good = good and share <= 0.05
        print()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, help="made in a temporary directory if absent")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--implementations", default="eager,grouped_mm", help="of transformers' experts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint or Path(folder)
        if not (checkpoint / "config.json").exists():
            make_checkpoint(checkpoint, seed=args.seed)
        return 0 if asyncio.run(run(args, checkpoint)) else 1


if __name__ == "__main__":
    sys.exit(main())
