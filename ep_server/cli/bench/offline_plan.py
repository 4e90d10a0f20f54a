"""What an offline benchmark is told to do, and what it found. Units: seconds, tokens."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from ep_server.cli.bench.breakdown import Steps
from ep_server.cli.bench.load import Load
from ep_server.config import Config
from ep_server.errors import ConfigError

SHORT_TOKENS = 8  # of output in the run that is subtracted
TIMED_EVERY = 32  # steps: on GPUs one of them has stamps between its phases, which cost it some percent


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. batches: sequences per rank. rounds: of each batch; the median counts."""

    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    rounds: int = 3
    seed: int = 0
    timeout: float = 600.0

    def load(self, batch: int, ranks: int, vocab_size: int) -> Load:
        """The prompts of one run."""
        count = batch * ranks
        return Load(
            count,
            count,
            0.0,
            self.prompt_tokens,
            self.new_tokens,
            vocab_size,
            self.seed,
            timeout=self.timeout,
        )


@dataclass(frozen=True, slots=True)
class Round:
    """Two runs of a batch, one short and one whole. None: there was nothing to measure it from.

    by_difference, direct: decode tokens per second of all ranks. whole: with the prefill.
    steps: the decode steps alone.
    """

    by_difference: float | None
    direct: float | None
    whole: float
    steps: Steps | None


@dataclass(frozen=True, slots=True)
class Result:
    """One batch size. rounds: in the order they ran."""

    batch: int
    ranks: int
    rounds: tuple[Round, ...]

    @property
    def steps(self) -> Steps | None:
        """Of the round whose step was the median one."""
        known = sorted((r.steps for r in self.rounds if r.steps is not None), key=lambda steps: steps.seconds)
        return known[(len(known) - 1) // 2] if known else None

    def rate(self, kind: str) -> float | None:
        """Median of a rate of Round over the rounds, None where none has it."""
        known = [value for r in self.rounds if (value := getattr(r, kind)) is not None]
        return median(known) if known else None

    def values(self) -> dict[str, Any]:
        """For JSON."""
        names = ("by_difference", "direct", "whole")
        return {
            "sequences_per_rank": self.batch,
            "ranks": self.ranks,
            "tokens_per_second": {name: self.rate(name) for name in names},
            "rounds": [{name: getattr(r, name) for name in names} for r in self.rounds],
        }


def prepared(config: Config, plan: Plan) -> Config:
    """The configuration with room for the largest batch, in which GPUs time some of their steps.

    Raises: ConfigError where scheduler.kv_blocks is set and too small, or for several nodes.
    """
    if config.cluster.nodes != 1:
        raise ConfigError("cluster.nodes", config.cluster.nodes, "1: offline runs the ranks of one host")
    length, most, scheduler = plan.prompt_tokens + plan.new_tokens, max(plan.batches), config.scheduler
    blocks = most * -(-length // scheduler.block_size)
    if 0 < scheduler.kv_blocks < blocks:
        allowed = f"0, or at least {blocks} for {most} sequences of {length} tokens on a rank"
        raise ConfigError("scheduler.kv_blocks", scheduler.kv_blocks, allowed)
    total = most * config.parallel.ranks
    room = {
        # One more for each: a step may be planned before it is known that a sequence has ended.
        "scheduler.kv_blocks": scheduler.kv_blocks or blocks + most,
        "scheduler.max_running": max(scheduler.max_running, most),
        "scheduler.max_step_tokens": max(scheduler.max_step_tokens, most),
        "scheduler.max_queue": max(scheduler.max_queue, total),
        "grpc.max_streams": max(config.grpc.max_streams, total),
        "grpc.stream_buffer": max(config.grpc.stream_buffer, plan.new_tokens),
    }
    if config.parallel.device == "cuda":
        room["metrics.device_phases"] = config.metrics.device_phases or TIMED_EVERY
    return Config.from_values(config.values() | room)


def short_of(new_tokens: int) -> int:
    """Tokens of output in the run that is subtracted."""
    return min(SHORT_TOKENS, max(new_tokens // 2, 1))
