"""Requests of every kind that join, are cancelled and preempted with steps in flight: all get their tokens.

Those are what it gets alone. Steps are captured in both keys, also with chunks of prompts, and at times in
a larger bucket than they need, as another rank's; or they are too large for any graph.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.runner import GpuRunner
from ep_server.records import Request, Sampling, StepBatch, Stopping, TokenEvent
from ep_server.scheduler import RankScheduler, SchedulerLimits
from tests.support.gpu import watched
from tests.support.models.driver import BLOCK
from tests.support.triton.harness import DEVICE

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # numpy, of what is masked, in the interpreter
VOCAB, COUNT = 200, 5
SEEDS = [203, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (201, 202, 204))]
MIXED = 14  # rows of a bucket for chunks too: more than sequences
FORMS = (GraphKey(1), GraphKey(2), GraphKey(2, 2), GraphKey(4), GraphKey(4, 2), GraphKey(MIXED))
KINDS = (
    *({**kind, "allowed_token_ids": kind.get("allowed_token_ids", ())[:66]} for kind in watched.SAMPLING),
    {"temperature": 0.8, "seed": 3, "top_p": 0.7},
)


def limits(blocks: int, running: int, tokens: int, ahead: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_running=running, max_step_tokens=tokens, block_size=BLOCK, kv_blocks=blocks,
        prefix_cache=True, max_context=watched.CONTEXT, ahead=ahead,
    )  # fmt: skip


def asked(number: int, rng: random.Random) -> Request:
    """Half of the prompts begin alike: the prefix cache has something to do."""
    ids = range(3, 17) if rng.random() < 0.5 else (rng.randrange(VOCAB) for _ in range(14))
    prompt = (*ids, number % VOCAB)[: rng.choice((1, 3, 9, 15))]
    stopping = Stopping(rng.choice((1, 4, 10)), eos_token_ids=frozenset({7}))
    return Request(f"r{number}", number, prompt, Sampling(**rng.choice(KINDS)), stopping)


class Driven:
    """A runner under a scheduler, as a rank drives it. rng: how many micro-batches a step is cut into."""

    def __init__(self, runner: GpuRunner, given: SchedulerLimits, rng: random.Random | None = None) -> None:
        self.runner, self.scheduler, self.rng = runner, RankScheduler(given), rng
        self.flying: deque = deque()
        self.tokens: dict[int, list[TokenEvent]] = {}

    def add(self, request: Request) -> None:
        self.runner.add(request)
        self.scheduler.add(request)

    def step(self) -> None:
        self.forget(self.scheduler.freed())
        batch = self.scheduler.plan()
        bucket = self.bucket_of(batch)
        agreed = self.rng.choice((1, 2)) if self.rng else 1
        count = self.runner.micro_batches_of(bucket, agreed)
        self.flying.append((batch, self.runner.launch(batch, count, bucket)))
        while len(self.flying) > self.scheduler.limits.ahead or (self.flying and not self.scheduler.has_work):
            batch, launched = self.flying.popleft()
            events = self.scheduler.commit(batch, self.runner.collect(launched))
            for event in events:
                self.tokens.setdefault(event.number, []).append(event)
            self.forget([event.number for event in events if event.finish is not None])
            self.forget(self.scheduler.freed())

    def bucket_of(self, batch: StepBatch) -> int:
        if self.rng is None:
            return 0
        own = self.runner.bucket_of(batch)
        return MIXED if self.rng.random() < 0.25 and (own or not batch.slices) else own

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.runner.remove(number)

    def of(self, number: int) -> list[tuple[int, float | None]]:
        return [(e.token_id, e.logprob) for e in self.tokens.get(number, [])]


def made(folder: Path, keys: tuple[GraphKey, ...], monkeypatch: pytest.MonkeyPatch) -> GpuRunner:
    monkeypatch.setitem(watched.CONFIG, "vocab_size", VOCAB)
    monkeypatch.setitem(watched.CONFIG, "num_hidden_layers", 1)
    return watched.made_runner(folder, DEVICE, keys)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="in bfloat16 a request's tokens depend on its neighbours")
@pytest.mark.parametrize("seed", SEEDS)
def test_each_request_gets_the_tokens_that_it_gets_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    requests = [asked(number, rng) for number in range(1, COUNT + 1)]
    joins = {request.number: rng.randrange(3) for request in requests}
    cancelled = {rng.randrange(1, COUNT + 1): rng.randrange(2, 10) for _ in range(2)}
    runner = made(tmp_path, FORMS, monkeypatch)
    together = Driven(runner, limits(8, rng.choice((3, 5)), rng.choice((7, 16)), 1), rng)
    alone = Driven(runner, limits(64, 1, 64, 0))
    with torch.inference_mode():
        at = 0
        while at < 3 or together.scheduler.has_work:
            for request in requests:
                if joins[request.number] == at:
                    together.add(request)
            gone = [n for n, step in cancelled.items() if step == at and together.scheduler.cancel(n)]
            cancelled = {n: -1 if n in gone else step for n, step in cancelled.items()}
            together.step()
            at += 1
        together.forget(together.scheduler.freed())
        assert together.scheduler.load().preemptions or -1 in cancelled.values()
        together.scheduler.check_integrity()
        for request in requests:
            alone.add(request)
            while alone.scheduler.has_work:
                alone.step()
            expected, drawn = alone.of(request.number), together.of(request.number)
            if cancelled.get(request.number) == -1:
                expected = expected[: len(drawn)]
            assert [token for token, _ in drawn] == [token for token, _ in expected]
            for (_, ours), (_, theirs) in zip(drawn, expected, strict=True):
                assert ours == (None if theirs is None else pytest.approx(theirs, abs=1e-3))
