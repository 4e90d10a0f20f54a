"""Runs the tests for GPUs in parts beside each other, each part on as many GPUs as its tests have ranks.

A GPU has two places, for most of a test's time passes on the host; parts of slow tests, which keep their GPUs
busy, take both. Which tests are in which part: tests/support/parts.py. Seconds.

    python3 scripts/gpu_tests.py PYTEST_COMMAND...    exit status 0: no test failed
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

RANKS = (4, 3, 2, 1, 0)  # that tests have, as in tests/support/parts.py
PLACES = 2  # of a GPU
SECONDS = 900  # for one part
NOTHING_TO_DO = 5  # exit status of pytest where no test was left


@dataclass(frozen=True)
class Part:
    """Part `number` of `count` of the tests of so many ranks that are slow, or that are not."""

    ranks: int
    slow: bool
    number: int
    count: int

    def __str__(self) -> str:
        """The value of --part."""
        return f"{self.ranks}{'-slow' if self.slow else ''}:{self.number}/{self.count}"


def parts_for(gpus: int) -> list[Part]:
    """All of them; first those that want GPUs to themselves, then those that want many."""
    found = [Part(ranks, True, 1, 1) for ranks in RANKS if ranks]
    for ranks in RANKS:
        count = max(1, PLACES * gpus // max(ranks, 2)) if ranks else 1
        found += [Part(ranks, False, number, count) for number in range(1, count + 1)]
    return found


@dataclass
class Running:
    """A part under way. gpus: ordinals, of each of which it has `places`."""

    part: Part
    gpus: tuple[int, ...]
    places: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float


class Machine:
    """Places of GPUs, and what runs in them."""

    def __init__(self, ordinals: Sequence[str], command: Sequence[str], folder: Path) -> None:
        self._ordinals, self._command, self._folder = ordinals, command, folder
        self._free = [PLACES] * len(ordinals)
        self.running: list[Running] = []

    def start(self, part: Part) -> bool:
        """Whether there was room for it."""
        places = PLACES if part.slow else 1
        room = [gpu for gpu, free in enumerate(self._free) if free >= places]
        room.sort(key=lambda gpu: -self._free[gpu])
        wanted = min(part.ranks, len(self._ordinals))
        if len(room) < wanted:
            return False
        gpus = tuple(sorted(room[:wanted]))
        for gpu in gpus:
            self._free[gpu] -= places
        visible = ",".join(self._ordinals[gpu] for gpu in gpus)
        log = (self._folder / str(part).replace("/", "of")).open("w+b")
        process = subprocess.Popen(
            [*self._command, "--part", str(part)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": visible} if gpus else None,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.running.append(Running(part, gpus, places, process, log, time.monotonic()))
        return True

    def ended(self) -> list[Running]:
        """Those that ended since; one beyond its time is killed."""
        for each in self.running:
            if time.monotonic() - each.began > SECONDS:
                kill(each)
        done = [each for each in self.running if each.process.poll() is not None]
        for each in done:
            self.running.remove(each)
            for gpu in each.gpus:
                self._free[gpu] += each.places
        return done


def kill(each: Running) -> None:
    """With the ranks that its tests have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(each.process.pid, signal.SIGKILL)
    each.process.wait()


def report(each: Running) -> bool:
    """Prints how a part ended, all it said if not well; whether it ended well."""
    each.log.seek(0)
    lines = each.log.read().decode(errors="replace").splitlines()
    each.log.close()
    code, where = each.process.returncode, ",".join(map(str, each.gpus)) or "none"
    well = code in {0, NOTHING_TO_DO}
    if not well:
        print(*lines, sep="\n")
    said = [line for line in lines if line.startswith("SKIPPED")] if well else []
    print(*said, sep="\n", end="\n" if said else "")
    last = lines[-1] if lines else ""
    print(f"part {each.part}, GPUs {where}: exit status {code}, {last}", flush=True)
    return well


def run_all(parts: Sequence[Part], ordinals: Sequence[str], command: Sequence[str]) -> int:
    """How many parts failed."""
    failed, waiting = 0, list(parts)
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(ordinals, command, Path(folder))
        try:
            while waiting or machine.running:
                waiting = [part for part in waiting if not machine.start(part)]
                failed += sum(not report(each) for each in machine.ended())
                time.sleep(0.1)
        finally:
            for each in machine.running:  # interrupted
                kill(each)
    return failed


def ordinals_here() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this process sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return given.split(",")[:count] if given else [str(gpu) for gpu in range(count)]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the parts, too
    ordinals = ordinals_here()
    if not ordinals:
        raise SystemExit("no GPU is here")
    failed = run_all(parts_for(len(ordinals)), ordinals, sys.argv[1:])
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
