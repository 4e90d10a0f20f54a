"""No step waits for a compiler: what a rank runs before it is ready has compiled all that traffic needs."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_server.backends.gpu import runner as runner_module
from ep_server.backends.gpu.runner import STAGES, GpuRunner
from ep_server.backends.gpu.step_input import StepInput, StepTensors
from ep_server.ranks.build import warm_up
from ep_server.records import Request, Sampling, SeqSlice, StepBatch, Stopping
from ep_server.scheduler.batch import SchedulerLimits
from tests.support.gpu import watched
from tests.support.gpu.specialised import (
    BLOCK,
    BLOCKS,
    GQA,
    MLA,
    Rank,
    kernels_for_hopper,
    recorded,
    still_runner,
    without_products,
)
from tests.support.triton.harness import INTERPRETED

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="launches are looked at where kernels are interpreted"
)
CONTEXT, PROMPT, PENALISED = 8192, 4000, 1
TABLE = tuple(range(BLOCKS - 1))
CHUNKS = (2, 3, 7, 16, 33, 129, 700, 2048)
RANKS = {
    "alone": Rank(GQA),
    "alone, two micro-batches": Rank(GQA, overlap="on"),
    "of two, one micro-batch": Rank(GQA, ranks=2),
    "of two, two micro-batches": Rank(GQA, ranks=2, overlap="on"),
    "of two, both": Rank(GQA, ranks=2, overlap="auto"),
    "few sequences": Rank(GQA, ranks=2, overlap="on", sequences=24),
    "on Hopper": Rank(GQA | {"head_dim": 128}, overlap="auto", hopper=True),
    "FP8 cache on Hopper": Rank(GQA | {"head_dim": 128}, overlap="on", copies=True),
    "without graphs": Rank(GQA, ranks=2, overlap="on", graphs=False),
    "latent": Rank(MLA, ranks=2, overlap="auto"),
    "latent, alone": Rank(MLA, overlap="on"),
    "latent on Hopper": Rank(MLA, overlap="auto", copies=True),
}


def started(folder: Path, rank: Rank) -> GpuRunner:
    """What build_rank does with a runner before the rank is ready."""
    runner = still_runner(folder, rank)
    limits = SchedulerLimits(
        max_running=rank.sequences, max_step_tokens=rank.tokens, block_size=BLOCK, kv_blocks=BLOCKS,
        prefix_cache=False, max_context=CONTEXT, ahead=1,
    )  # fmt: skip
    warm_up(runner, limits, (1,) if rank.overlap == "off" else (1, 2))
    runner.prepare()
    return runner


def steps(rank: Rank, rng: random.Random) -> list[StepBatch]:
    """Many numbers of single tokens, with and without chunks of any sizes."""
    found, near = [], {0, 1, 2, 3, 5, 9, 17, 33, 64, 65, 66, 67, 127, 128, 129, rank.sequences}
    for singles in sorted(near | set(rng.sample(range(rank.sequences), 12))):
        if singles > rank.sequences:
            continue
        for most in (0, rng.choice((1, 3, 40, 200))):
            chunks, room = [], rank.tokens - singles
            while len(chunks) < min(most, rank.sequences - singles) and room > 1:
                chunks.append(min(rng.choice(CHUNKS[: rng.randint(1, len(CHUNKS))]), room))
                room -= chunks[-1]
            sizes = [1] * singles + [size for size in chunks if size > 1]
            slices = []
            for number, size in enumerate(sizes, start=1):
                start = PROMPT - size if number == PENALISED else rng.randrange(CONTEXT - size)
                held = -(-(start + size) // BLOCK)
                slices.append(
                    SeqSlice(number, start, (0,) * size, TABLE[:held], size == 1 or rng.random() < 0.5)
                )
            found.append(StepBatch(tuple(slices), sum(sizes)))
    return found


def request(number: int) -> Request:
    """All parameters of sampling. One with penalties draws but once: what it has drawn must be known."""
    *plain, penalised = watched.SAMPLING
    wanted = penalised if number == PENALISED else plain[number % len(plain)]
    sampling = replace(Sampling(**wanted), allowed_token_ids=tuple(range(9)) if number == PENALISED else ())
    return Request(f"r{number}", number, (0,) * PROMPT, sampling, Stopping(9))


@pytest.mark.parametrize("name", RANKS)
def test_traffic_needs_no_kernel_that_is_not_there(name: str, tmp_path: Path) -> None:
    rank, rng = RANKS[name], random.Random(7)
    on = kernels_for_hopper() if rank.hopper or rank.copies else nullcontext()
    with on, without_products(), recorded() as launches, torch.inference_mode():
        runner = started(tmp_path, rank)
        warm = frozenset(launches)
        for number in range(1, rank.sequences + 1):
            runner.add(request(number))
        for batch in steps(rank, rng):
            bucket = runner.bucket_of(batch)
            agreed = {"off": 1, "on": 2, "auto": rng.choice((1, 2))}[rank.overlap]
            runner.launch(batch, runner.micro_batches_of(bucket, agreed), bucket)
    assert warm
    names = {launch[0] for launch in launches}
    assert rank.hopper != ("_decode_kernel" in names)
    copied = {"_widen_kernel" if rank.config is not MLA else "_expand_kernel"} if rank.copies else set()
    assert names & {"_widen_kernel", "_expand_kernel"} == copied
    missing = {str(launch) for launch in launches - warm}
    assert not missing, "\n".join(sorted(missing)[:20])


def prepared(folder: Path, rank: Rank) -> list[int]:
    """Rows of each step that a rank fills before it is ready; 0 where it waits for its device."""
    done: list[int] = []
    fill = StepInput.fill

    def filled(self: StepInput, batch: StepBatch, *rest: Any, **named: Any) -> StepTensors:
        done.append(max(batch.num_tokens, 1))
        return fill(self, batch, *rest, **named)

    with pytest.MonkeyPatch.context() as patch, without_products(), recorded(), torch.inference_mode():
        patch.setattr(StepInput, "fill", filled)
        patch.setattr(runner_module, "await_current", lambda *_: done.append(0))
        still_runner(folder, rank).prepare()
    return done


def test_no_input_is_written_anew_before_the_device_has_read_it(tmp_path: Path) -> None:
    waiting = 0
    for rows in prepared(tmp_path, Rank(GQA, ranks=2, graphs=False)):
        waiting = waiting + 1 if rows else 0
        assert waiting <= STAGES


def test_ranks_with_fewer_blocks_take_part_in_as_many_steps(tmp_path: Path) -> None:
    """The exchange is collective; how many blocks a rank has depends on what is free on its own GPU."""
    many, few = (prepared(tmp_path, Rank(GQA, ranks=2, graphs=False, blocks=n)) for n in (BLOCKS, 3))
    assert len(many) == len(few)
    assert max(many) == 2048 and max(few) == 3 * BLOCK
