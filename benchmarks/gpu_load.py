"""Seconds from a checkpoint's files to weights on GPUs: the engine's loader, safetensors' own, their bounds.

    python3 benchmarks/gpu_load.py [--shape qwen3-30b-a3b] [--layers 12] [--ranks N] [--cold] [--folder DIR]

Writes a checkpoint first (load_checkpoint.py), and removes it. Each rank is a process with a GPU of its own
where there are so many, and owns its share of the experts; all begin each round together, and a round takes
as long as the slowest: the first and the best are told. After the first, bits of a sample are compared.
Warm: the files are in the page cache, as they were just written. Cold: before each round they are dropped
from it, which a file system in memory cannot. GB are 10^9 bytes that ranks read, all together.

reading      the same bytes by pread into host memory, with as many threads; bound
copying      pinned memory to the device; bound, of a rank's bytes
safetensors  load_file(device) of every shard; with several ranks get_tensor() of what a rank owns
plain x1     the engine's loader with plain reads into host memory, copied tensor by tensor, one thread
plain        the same with as many threads
engine       the engine's loader as a rank runs it
slots        its experts alone, into slots that are there, as after the loss of a rank
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.load_checkpoint import write
from benchmarks.load_rank import Case, Row, measure
from ep_server.backends.assembly import MOST_READERS

ROW = "{:<12} {:>8} {:>8} {:>8} {:>8} {:>12}"


def hardware(device: str, folder: Path) -> str:
    """One line: what this ran on."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(len(at), kind) for at, kind in mounts if folder.resolve().is_relative_to(at)]
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, " if device == "cuda" else ""
    return (
        f"{gpus}{cores} cores ({processor()}), {memory:.0f} GB, files on {max(inside)[1]}, "
        f"torch {torch.__version__}, safetensors {version('safetensors')}"
    )


def processor() -> str:
    """Its name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def measured(case: Case) -> list[list[Row]]:
    """Rows of each rank."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(case.ranks, context) as pool:
        barrier = manager.Barrier(case.ranks)
        jobs = [pool.submit(measure, case, rank, barrier) for rank in range(case.ranks)]
        for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
            if job.exception() is not None:
                barrier.abort()  # the others would wait for this rank
                job.result()
        return [job.result() for job in jobs]


def report(ranks: Sequence[Sequence[Row]]) -> None:
    """The table."""
    found = {}
    for rows in zip(*ranks, strict=True):
        slowest = [max(together) for together in zip(*(row.seconds for row in rows), strict=True)]
        found[rows[0].name] = (sum(row.nbytes for row in rows) / 1e9, slowest)
    base = min(found["safetensors"][1])
    print(ROW.format("", "GB", "first s", "best s", "GB/s", "x safetens."))
    for name, (size, seconds) in found.items():
        took = min(seconds)
        times = (f"{seconds[0]:.2f}", f"{took:.2f}", f"{size / took:.1f}", f"{base / took:.2f}")
        print(ROW.format(name, f"{size:.1f}", *times), flush=True)


def arguments() -> argparse.Namespace:
    """As given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="of benchmarks/shapes, or a folder")
    parser.add_argument("--layers", type=int, default=0, help="0 = the shape's own")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="of a rank; 0 = cores / ranks, 16 at the most")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache every time")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; default: /tmp")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    cores = len(os.sched_getaffinity(0))
    threads = given.threads or max(1, min(cores // given.ranks, MOST_READERS))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        print(hardware(given.device, Path(folder)))
        began = time.perf_counter()
        spec = write(Path(folder), given.shape, given.layers, cores)
        took = time.perf_counter() - began
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 1e9
        print(
            f"{given.shape}, {spec.num_layers} layers, {size:.1f} GB written in {took:.1f} s; "
            f"{given.ranks} ranks x {threads} threads, page cache {'cold' if given.cold else 'warm'}",
            flush=True,
        )
        report(measured(Case(Path(folder), given.ranks, threads, given.device, given.rounds, given.cold)))


if __name__ == "__main__":
    main()
