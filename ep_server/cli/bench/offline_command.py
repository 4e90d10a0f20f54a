"""`ep-server bench offline`: starts an engine, measures, shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from ep_server.cli.app import warn_if_made_up
from ep_server.cli.bench import offline, pictures, tables
from ep_server.cli.bench.breakdown import Rates, Steps, bounds
from ep_server.cli.bench.load import check_length
from ep_server.cli.bench.offline_plan import Plan, Result, prepared, short_of
from ep_server.cli.bench.output import Output
from ep_server.cli.inspect_plan import CPU_BANDWIDTH, DEVICES, GB, GPUS
from ep_server.cli.progress import Bars
from ep_server.config import Config
from ep_server.errors import ConfigError
from ep_server.frontend.served_model import ServedModel
from ep_server.models.families import ModelSpec, read_spec
from ep_server.models.sizes import context_limit, serving_dtype
from ep_server.ranks.sizing import distinct_experts

LARGEST_BATCH = 4096


def plan(batch: str, prompt_tokens: int, new_tokens: int, rounds: int, seed: int, timeout: float) -> Plan:
    """From flags. Raises: ConfigError."""
    try:
        batches = tuple(int(number) for number in batch.split(","))
    except ValueError:
        batches = ()
    if not batches or not all(1 <= number <= LARGEST_BATCH for number in batches):
        raise ConfigError("--batch", batch, f"numbers from 1 to {LARGEST_BATCH} with commas between")
    return Plan(batches, prompt_tokens, new_tokens, rounds, seed, timeout)


def rates(config: Config, device: str, bandwidth: float, link: float) -> Rates:
    """What bounds are reckoned with.

    Args:
        device: empty = what the ranks run on; a GPU is taken for an H200 then.
        bandwidth, link: GB/s of one rank, 0 = the device's.

    Raises: ConfigError for an unknown device.
    """
    device = device or ("cpu" if config.parallel.device == "cpu" else "h200")
    if device == "cpu":
        memory = bandwidth or CPU_BANDWIDTH / config.parallel.ranks
        return Rates(memory * GB, (link or memory) * GB)
    if device not in GPUS:
        raise ConfigError("--device", device, "one of " + ", ".join(DEVICES))
    _, memory, between, _ = GPUS[device]
    return Rates(
        (bandwidth or memory) * GB, (link or between) * GB, packed=False, kv_dtype=config.model.kv_dtype
    )


async def run(config: Config, asked: Plan, rates: Rates, output: Output) -> int:
    """Measures and shows. Returns: exit code. Raises: ConfigError, StartupError."""
    model = ServedModel.load(config.model)
    warn_if_made_up(config.model)
    config, spec = prepared(config, asked), read_spec(config.model.path)
    check_length(asked.prompt_tokens, asked.new_tokens, context_limit(spec, config.model.max_context))
    console, done = Console(stderr=True), 0
    with Bars(console, console.print) as bars:
        async with offline.running(config, model, bars.loading) as engine:

            def on_round() -> None:
                nonlocal done
                done += 1
                bars.show("rounds", done, len(asked.batches) * asked.rounds)
                if not console.is_terminal:  # where bars say what is complete only
                    console.print(f"round {done} of {len(asked.batches) * asked.rounds}")

            found = await offline.measure(engine, model, asked, sum(spec.sparse_layers), on_round)
    shown = _Shown(config, spec, asked, rates, found)
    output.show(
        shown.values(model.name), lambda to: shown.print(to, model.name), lambda: shown.picture(model.name)
    )
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Shown:
    """Results with what they are compared to."""

    config: Config
    spec: ModelSpec
    plan: Plan
    rates: Rates
    results: Sequence[Result]

    @property
    def uniform(self) -> bool:
        """Experts were drawn."""
        return self.config.model.routing == "uniform"

    def least(self, result: Result) -> Mapping[str, float]:
        """Bounds of the phases of a decode step; empty where no step was measured."""
        if result.steps is None:
            return {}
        # Steps between the short run and the whole one; the mean of their contexts.
        context = self.plan.prompt_tokens + (short_of(self.plan.new_tokens) + self.plan.new_tokens) / 2
        dtype = serving_dtype(self.spec, self.config.model.dtype)
        return bounds(self.spec, dtype, result.steps, context, self.rates)

    def title(self, name: str) -> str:
        """What was measured, in a line."""
        ranks = self.config.parallel.ranks
        made_up = ", uniform routing" if self.uniform else ""
        return (
            f"{name}: decode on {ranks} rank{'s' * (ranks > 1)}, {self.plan.prompt_tokens} prompt + "
            f"{self.plan.new_tokens} output tokens{made_up}"
        )

    def print(self, console: Console, name: str) -> None:
        """Tables."""
        tables.offline(console, self.results, self.title(name))
        for result in self.results:
            if result.steps is not None:
                title = f"{result.batch} sequences per rank, mean of {result.steps.count} steps"
                tables.step(console, result.steps, self.least(result), title)
                console.print(tables.overlap_line(result.steps, self.config.parallel.overlap))
                console.print(tables.experts_line(result.steps, self.spec.router, uniform=self.uniform))
        console.print(
            f"bounds: bytes at {self.rates.memory / GB:g} GB/s of memory and {self.rates.link / GB:g} GB/s "
            "between ranks, of one rank; phases one after the other"
        )

    def values(self, name: str) -> dict[str, Any]:
        """For JSON."""
        return {
            "mode": "offline",
            "model": name,
            "routing": self.config.model.routing,
            "overlap": self.config.parallel.overlap,
            "config": self.config.changed(),
            "plan": dataclasses.asdict(self.plan),
            "rates": dataclasses.asdict(self.rates),
            "batches": [
                {**result.values(), "step": self._step(result.steps, self.least(result))}
                for result in self.results
            ],
        }

    def _step(self, steps: Steps | None, least: Mapping[str, float]) -> dict[str, Any] | None:
        if steps is None:
            return None
        router = self.spec.router
        return {
            **dataclasses.asdict(steps),
            "bounds": dict(least),
            "host_share": steps.host_share,
            "distinct_experts": steps.distinct,
            "distinct_expected": distinct_experts(router.num_experts, router.top_k, steps.tokens),
            "rank_imbalance": steps.imbalance,
        }

    def picture(self, name: str) -> str:
        """SVG."""
        least = {result.batch: self.least(result) for result in self.results}
        return pictures.offline(self.title(name), self.results, least)
