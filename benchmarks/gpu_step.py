"""One decode step of a shape on one GPU, as a replayed graph, and kernel by kernel.

    python3 benchmarks/gpu_step.py qwen3-30b-a3b --batch 64,128,256 --layers 4 [--profile]
    python3 benchmarks/gpu_step.py --batch 32 --context 512 --chunks 8,32 --behind 16384 --profile

Random weights, experts drawn uniformly, one rank in this process. With fewer layers than the model has, the
time of the whole model is what one layer adds, times its layers, plus the rest. Times in microseconds. With
--chunks, steps follow that hold so many prompt tokens beside the largest batch, behind others in the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_timing import arguments, median_us, numbers

from ep_server.backends.gpu import decoder
from ep_server.backends.gpu.graphs import GraphKey, buckets_with_chunks
from ep_server.backends.gpu.kernels.hopper.products import Limits
from ep_server.config import Config
from ep_server.exchange.segment import create_segment
from ep_server.exchange.spec import control_spec
from ep_server.models.families import read_spec
from ep_server.ranks.build import RankParts, build_rank
from ep_server.ranks.devices import CudaDevice
from ep_server.ranks.exchanges import Opening
from ep_server.ranks.group import exchange_spec
from ep_server.records import Request, Sampling, SeqSlice, StepBatch, Stopping
from ep_server.v1 import rank_pb2 as pb

SHAPES = Path(__file__).parent / "shapes"
BLOCK = 16  # positions
MOST = 512  # tokens of a step


class Case(NamedTuple):
    """batch: sequences of one token. chunk: prompt tokens beside them. bucket: rows of the graph."""

    batch: int
    chunk: int
    bucket: int

    def __str__(self) -> str:
        return f"batch {self.batch}" + (f" + {self.chunk} in {self.bucket}" if self.chunk else "")


def cases_of(given: argparse.Namespace) -> list[Case]:
    """Every batch, then every chunk beside the largest one. A chunk of one token is one more sequence."""
    most = max(given.batch)
    buckets = buckets_with_chunks(running(given), MOST)
    padded = [
        running(given) if chunk == 1 else buckets[bisect_left(buckets, most + chunk)]
        for chunk in given.chunks
    ]
    chunks = [Case(most, chunk, bucket) for chunk, bucket in zip(given.chunks, padded, strict=True)]
    return [*(Case(batch, 0, batch) for batch in given.batch), *chunks]


def running(given: argparse.Namespace) -> int:
    """Sequences of the largest graph without chunks."""
    return max(given.batch) + 2 if given.chunks else max(*given.batch, 256)


def shortened(shape: str, layers: int, folder: str, context: int = 0) -> Path:
    """A config.json of so many layers. context: tokens that it must allow at least."""
    values = json.loads((SHAPES / shape / "config.json").read_text())
    values["num_hidden_layers"] = layers
    values["max_position_embeddings"] = max(values["max_position_embeddings"], context)
    (Path(folder) / "config.json").write_text(json.dumps(values))
    return Path(folder)


def built(
    path: Path,
    buckets: Sequence[int],
    context: int,
    routing: str,
    most: int = MOST,
    sequences: int = 256,
    kv_dtype: str = "auto",
) -> RankParts:
    """A rank with graphs of these buckets alone. most: tokens of a step. sequences: at once."""

    class Captured(CudaDevice):
        def prepare(self, progress: Callable[[str, int, int], None]) -> None:
            self.runner.graphs.record_only(GraphKey(bucket) for bucket in buckets)
            super().prepare(progress)

    values = {
        "model.path": str(path),
        "model.load_format": "dummy",
        "model.routing": routing,
        "model.max_context": context + 64,
        "model.kv_dtype": kv_dtype,
        "parallel.device": "cuda",
        "parallel.ranks": 1,
        "scheduler.block_size": BLOCK,
        "scheduler.max_running": sequences,
        "scheduler.max_step_tokens": max(sequences, most),
    }
    config = Config.from_values(values)
    segment = create_segment(control_spec(exchange_spec(config, read_spec(str(path)), 0)))
    start = pb.Start(
        rank=0, num_ranks=1, threads=1, exchange_fd=segment, config_json=json.dumps(config.values())
    )
    opening = Opening(lambda _: None, lambda *_: pb.Connect())
    return build_rank(start, lambda *_: None, opening, Captured)


def step_of(case: Case, given: argparse.Namespace) -> StepBatch:
    """One token of each sequence, at position context - 1, and a chunk of one more."""
    held = -(-given.context // BLOCK)
    pieces = [
        SeqSlice(n, given.context - 1, (n % 1000,), tuple(range((n - 1) * held, n * held)), True)
        for n in range(1, case.batch + 1)
    ]
    if case.chunk:
        blocks = -(-(given.behind + case.chunk) // BLOCK)
        own = tuple(range(case.batch * held, case.batch * held + blocks))
        ids = tuple(n % 1000 for n in range(case.chunk))
        pieces.append(SeqSlice(case.batch + 1, given.behind, ids, own, True))
    return StepBatch(tuple(pieces), case.batch + case.chunk)


def profiled(work: Callable[[], object], batch: int, steps: int = 3) -> None:
    """Prints each kernel's count and time per step, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            work()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name].append(event.device_time)
    total = sum(map(sum, spent.values())) / steps
    print(f"  kernels of a step of {batch}: calls, us each, us in all; sum {total:.1f}")
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        print(
            f"{len(times) / steps:6.1f} {statistics.median(times):8.2f} {sum(times) / steps:9.1f} {name[:88]}"
        )


def measured(parts: RankParts, case: Case, step: StepBatch) -> float:
    """Time of a replay, us."""
    runner: Any = parts.runner
    with torch.inference_mode():
        runner.collect(runner.launch(step, 1, case.bucket))
        return median_us(lambda: runner.graphs.replay(GraphKey(case.bucket)))


@contextlib.contextmanager
def joined(parts: RankParts, step: StepBatch) -> Iterator[None]:
    """The requests of a step."""
    runner: Any = parts.runner
    for piece in step.slices:
        prompt, number = (0,) * max(piece.start, 1), piece.number
        runner.add(Request(f"r{number}", number, prompt, Sampling(temperature=0.0), Stopping(1 << 20)))
    yield
    for piece in step.slices:
        runner.remove(piece.number)


def explored(parts: RankParts, case: Case, step: StepBatch, *, profile: bool) -> None:
    """Launches of whole steps, and the kernels of one."""
    runner: Any = parts.runner
    with torch.inference_mode():
        whole = median_us(lambda: runner.launch(step, 1, case.bucket))
        print(f"  {case}: launch with sampling {whole:.1f} us", flush=True)
        if profile:
            profiled(lambda: runner.launch(step, 1, case.bucket), step.num_tokens)


def by_case(given: argparse.Namespace, layers: int, *, explore: bool) -> dict[Case, float]:
    """us of each captured step, on a rank with so many layers, which is gone afterwards."""
    found, cases = dict[Case, float](), cases_of(given)
    longest = max(given.context, max((given.behind + chunk for chunk in given.chunks), default=0))
    print(f"{layers} layers", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path, buckets = shortened(given.shape, layers, folder, longest + 64), [case.bucket for case in cases]
        parts = built(path, buckets, longest, given.routing, sequences=running(given))
        for case in cases:
            step = step_of(case, given)
            with joined(parts, step):
                found[case] = measured(parts, case, step)
                print(f"  {case}: graph {found[case]:.1f} us", flush=True)
                if explore and case.batch in (given.batch[0], given.batch[-1]):
                    explored(parts, case, step, profile=given.profile)
        parts.exchange.close()
    del parts
    torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = arguments(__doc__, batch="64,128,256")
    parser.add_argument("--chunks", type=numbers, default=[], help="prompt tokens beside the largest batch")
    parser.add_argument("--behind", type=int, default=16384, help="tokens of their prompt in the cache")
    parser.add_argument("shape", nargs="?", default="qwen3-30b-a3b")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--hopper", type=numbers, help="rows of qkv, output and router products, at most")
    given = parser.parse_args()
    if given.hopper:
        decoder.HOPPER_LIMITS = Limits(*given.hopper)
    whole = json.loads((SHAPES / given.shape / "config.json").read_text())["num_hidden_layers"]
    print(torch.cuda.get_device_name(), torch.__version__, given.shape, f"context {given.context}")
    counts = [given.layers] if given.layers == whole else [given.layers // 2, given.layers]
    found = [by_case(given, layers, explore=layers == counts[-1]) for layers in counts]
    for case in cases_of(given):
        times = [each[case] for each in found]
        layer = (times[-1] - times[0]) / (counts[-1] - counts[0]) if len(counts) > 1 else times[0] / whole
        step = times[-1] + layer * (whole - counts[-1])
        print(
            f"{case}: layer {layer:.1f} us, step {step / 1e3:.2f} ms,"
            f" {(case.batch + case.chunk) / step * 1e6:.0f} tok/s"
        )


if __name__ == "__main__":
    main()
