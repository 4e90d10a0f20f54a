"""Reports of a benchmark: tables or JSON on standard output, JSON and a chart in files. Measures nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ep_server.cli.bench.breakdown import Rates, Steps, bounds, moe_seconds
from ep_server.cli.bench.charts import offline_chart, online_chart
from ep_server.cli.bench.load import Load, Trace
from ep_server.cli.bench.summary import Plan, Result, short_of
from ep_server.config import Config
from ep_server.errors import ConfigError
from ep_server.models.families import ModelSpec
from ep_server.models.families.spec import RouterSpec
from ep_server.models.sizes import serving_dtype
from ep_server.observability.fault_report import versions
from ep_server.ranks.sizing import distinct_experts

GB = 1e9
LATENCIES = {
    "time_to_first_token": "time to first token",
    "inter_token_latency": "inter token latency",
    "time_per_output_token": "mean gap of a request",
    "end_to_end": "end to end",
    "send_delay": "sent late by",
}
COLUMNS = ("mean", "p50", "p90", "p99", "max")
LEAST_DISTINCT = 0.95  # of what uniform draws give; with fewer experts, too few weights were read
PHASE_NAMES = {
    "wait": "wait for ranks",
    "host": "host: plan, publish",
    "rest": "outside the phases",
    "idle": "idle: waits for the host",
}


class Report(Protocol):
    """One benchmark's results in three forms."""

    def values(self) -> dict[str, Any]:
        """For JSON."""
        ...

    def print(self, console: Console) -> None:
        """Prints tables."""
        ...

    def chart(self) -> str:
        """SVG."""
        ...


@dataclass(frozen=True, slots=True)
class Output:
    """Where a report goes. as_json: print JSON instead of tables. json_file, chart: path, or "" for none."""

    as_json: bool
    json_file: str
    chart: str

    def check(self) -> None:
        """Refuses files that cannot be written, before anything is measured. Raises: ConfigError."""
        for flag, path in (("--json-file", self.json_file), ("--chart", self.chart)):
            if path and not _writable(Path(path).resolve()):
                raise ConfigError(flag, path, "a writable file in an existing directory")
        if self.chart and not self.chart.endswith(".svg"):
            raise ConfigError("--chart", self.chart, "a name that ends with .svg")
        if self.chart and Path(self.chart).resolve() == Path(self.json_file).resolve():
            raise ConfigError("--chart", self.chart, "a file other than --json-file")

    def show(self, report: Report) -> None:
        """Writes the files and prints. It prints even if a file cannot be written.

        Raises: ConfigError for a file that cannot be written.
        """
        found = {"measured": time.strftime("%Y-%m-%d"), "versions": versions(), **report.values()}
        refused = None
        try:  # files first: the reader of standard output may leave early
            self._write(found, report)
        except ConfigError as error:
            refused = error
        if self.as_json:
            print(json.dumps(found))
        else:
            report.print(Console())
        if refused is not None:
            raise refused

    def _write(self, found: dict[str, Any], report: Report) -> None:
        texts = {
            ("--json-file", self.json_file): lambda: json.dumps(found, indent=1) + "\n",
            ("--chart", self.chart): report.chart,
        }
        for (flag, path), text in texts.items():
            try:
                if path:
                    Path(path).write_text(text(), encoding="utf-8")
            except OSError as error:
                raise ConfigError(flag, path, f"a file that can be written ({error.strerror})") from error


def _writable(path: Path) -> bool:
    if path.exists():
        return not path.is_dir() and os.access(path, os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK)


@dataclass(frozen=True, slots=True)
class OnlineReport:
    """What callers saw. found: from summarise(). config, steps: of a server that the benchmark started."""

    model: str
    load: Load
    clients: int
    traces: Sequence[Trace]
    found: Mapping[str, Any]
    config: Config | None = None
    steps: Steps | None = None

    @property
    def title(self) -> str:
        """The load in one line."""
        load = self.load
        arrivals = f"{load.rate:g} requests/s (Poisson)" if load.rate else f"{load.concurrency} at once"
        lengths = f"{load.prompt_tokens} + {load.new_tokens} tokens"
        return f"{self.model}: {load.requests} requests, {arrivals}, {lengths}"

    def values(self) -> dict[str, Any]:
        """For JSON."""
        steps = self.steps
        return {
            "mode": "online",
            "model": self.model,
            "load": dataclasses.asdict(self.load),
            "clients": self.clients,
            "config": None if self.config is None else self.config.changed(),
            **self.found,
            "step": None if steps is None else dataclasses.asdict(steps) | {"host_share": steps.host_share},
        }

    def print(self, console: Console) -> None:
        """Prints tables."""
        print_latencies(console, self.found, self.title)
        if self.steps is not None and self.config is not None:
            title = f"the server, mean of {self.steps.count} steps, prefill included"
            print_step(console, self.steps, {}, title)
            console.print(overlap_line(self.steps, self.config.parallel.overlap))

    def chart(self) -> str:
        """SVG."""
        return online_chart(self.title, self.traces)


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """Decode rates, and the steps beside their bounds at `rates`."""

    model: str
    config: Config
    spec: ModelSpec
    plan: Plan
    rates: Rates
    results: Sequence[Result]

    @property
    def uniform(self) -> bool:
        """Whether experts were drawn at random."""
        return self.config.model.routing == "uniform"

    @property
    def title(self) -> str:
        """The plan in one line."""
        ranks = self.config.parallel.ranks
        return (
            f"{self.model}: decode on {ranks} rank{'s' * (ranks > 1)}, {self.plan.prompt_tokens} prompt + "
            f"{self.plan.new_tokens} output tokens{', uniform routing' if self.uniform else ''}"
        )

    def bounds(self, result: Result) -> Mapping[str, float]:
        """Least seconds of each phase of a decode step; empty if no step was measured."""
        if result.steps is None:
            return {}
        # The measured steps lie between the short run and the whole one: take the mean context.
        context = self.plan.prompt_tokens + (short_of(self.plan.new_tokens) + self.plan.new_tokens) / 2
        dtype = serving_dtype(self.spec, self.config.model.dtype)
        return bounds(self.spec, dtype, result.steps, context, self.rates)

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "mode": "offline",
            "model": self.model,
            "routing": self.config.model.routing,
            "overlap": self.config.parallel.overlap,
            "config": self.config.changed(),
            "plan": dataclasses.asdict(self.plan),
            "rates": dataclasses.asdict(self.rates),
            "batches": [result.values() | {"step": self._step(result)} for result in self.results],
        }

    def _step(self, result: Result) -> dict[str, Any] | None:
        steps, router = result.steps, self.spec.router
        if steps is None:
            return None
        return {
            **dataclasses.asdict(steps),
            "bounds": dict(self.bounds(result)),
            "moe_layer": steps.moe_layer(sparse := sum(self.spec.sparse_layers)),
            "moe_layer_bound": moe_seconds(self.bounds(result), sparse),
            "host_share": steps.host_share,
            "distinct_experts": steps.distinct,
            "distinct_expected": distinct_experts(router.num_experts, router.top_k, steps.tokens),
            "rank_imbalance": steps.imbalance,
        }

    def print(self, console: Console) -> None:
        """Prints tables."""
        print_rates(console, self.results, self.title)
        for result in self.results:
            if result.steps is not None:
                title = f"{result.batch} sequences per rank, mean of {result.steps.count} steps"
                print_step(console, result.steps, self.bounds(result), title)
                console.print(moe_line(result.steps, self.bounds(result), sum(self.spec.sparse_layers)))
                console.print(overlap_line(result.steps, self.config.parallel.overlap))
                console.print(experts_line(result.steps, self.spec.router, uniform=self.uniform))
        console.print(
            f"bounds: bytes of one rank at {self.rates.memory / GB:g} GB/s from memory and "
            f"{self.rates.link / GB:g} GB/s to other ranks, phases one after the other"
        )

    def chart(self) -> str:
        """SVG."""
        least = {result.batch: self.bounds(result) for result in self.results}
        return offline_chart(self.title, self.results, least)


def print_latencies(console: Console, found: Mapping[str, Any], title: str) -> None:
    """Latencies, throughput, goodput and errors. found: from summarise()."""
    table = Table("milliseconds", title=title)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for key, name in LATENCIES.items():
        values = found[key]
        table.add_row(name, *(f"{1000 * values[column]:.2f}" if values else "-" for column in COLUMNS))
    console.print(table)
    console.print(
        f"{found['tokens_per_second']:,.1f} tokens/s{_steady(found)}, "
        f"{found['requests_per_second']:.2f} requests/s, "
        f"{found['tokens_per_message']:.2f} tokens per message, {found['seconds']:.1f} s"
    )
    if "goodput" in found:
        console.print(_goodput(found["goodput"]))
    for status, count in found["statuses"].items():
        why = found["first_reasons"][status]
        console.print(f"[red]{count} failed with {status}{', the first: ' * bool(why)}{escape(why)}[/]")


def _steady(found: Mapping[str, Any]) -> str:
    if found["streams"] is None:
        return ""
    if found["steady_seconds"] is None:
        return f", {found['streams']} streams never ran at the same time"
    rate, seconds = found["steady_tokens_per_second"], found["steady_seconds"]
    return f", {rate:,.1f} tokens/s while all {found['streams']} streams ran ({seconds:.2f} s)"


def _goodput(good: Mapping[str, Any]) -> str:
    limits = [
        f"{name} <= {1000 * good[key]:g} ms"
        for name, key in (("first token", "slo_ttft"), ("mean gap", "slo_itl"))
        if good[key] is not None
    ]
    return (
        f"goodput ({' and '.join(limits)}): {good['requests_per_second']:.2f} requests/s, "
        f"{good['tokens_per_second']:,.1f} tokens/s, {good['share']:.1%} of the requests"
    )


def print_rates(console: Console, results: Sequence[Result], title: str) -> None:
    """Decode throughput by batch size."""
    table = Table("sequences per rank", title=title)
    for name in ("tokens/s by difference", "directly", "per rank", "with prefill", "range, directly"):
        table.add_column(name, justify="right")
    for result in results:
        direct = [r.direct for r in result.rounds if r.direct is not None]
        rates = [result.rate(kind) for kind in ("by_difference", "direct", "whole")]
        per_rank = None if rates[1] is None else rates[1] / result.ranks
        span = f"{min(direct):,.0f} to {max(direct):,.0f}" if direct else "-"
        cells = (rates[0], rates[1], per_rank, rates[2])
        table.add_row(str(result.batch), *("-" if r is None else f"{r:,.1f}" for r in cells), span)
    console.print(table)


def print_step(console: Console, steps: Steps, least: Mapping[str, float], title: str) -> None:
    """The phases of a step. least: their bounds in seconds; empty if none is known."""
    table = Table("phase", title=title)
    for name in ("ms", "share", *(("bound, ms", "of its bound") if least else ())):
        table.add_column(name, justify="right")
    names = PHASE_NAMES if steps.device is None else PHASE_NAMES | {"rest": "all steps minus the timed ones"}
    for name, seconds in steps.phases.items():
        against = _against(seconds, least.get(name)) if least else ()
        share = f"{seconds / steps.seconds:.1%}"
        table.add_row(names.get(name, name), f"{1000 * seconds:.3f}", share, *against)
    table.add_section()
    against = _against(steps.seconds, sum(least.values())) if least else ()
    table.add_row("all", f"{1000 * steps.seconds:.3f}", "", *against)
    console.print(table)


def _against(seconds: float, bound: float | None) -> tuple[str, str]:
    return (f"{1000 * bound:.3f}", f"{seconds / bound:.2f} x") if bound else ("-", "-")


def moe_line(steps: Steps, least: Mapping[str, float], sparse_layers: int) -> str:
    """Time of a MoE layer beside that of its bytes. least: bounds of a step by phase."""
    took, bound = steps.moe_layer(sparse_layers), moe_seconds(least, sparse_layers)
    beside = f"; its bytes alone take {1e6 * bound:.1f} us ({took / bound:.2f} x)" if bound else ""
    return f"MoE layer, router to residual: {1e6 * took:.1f} us{beside}"


def overlap_line(steps: Steps, mode: str) -> str:
    """How many steps had two micro-batches, and the host's share of a step. mode: as configured."""
    parts = "plan and publish" if steps.device is None else "step time minus device time"
    return (
        f"two micro-batches in {steps.overlapped:.1%} of the steps (overlap {mode}); "
        f"host share of a step {steps.host_share:.1%} ({parts})"
    )


def experts_line(steps: Steps, router: RouterSpec, *, uniform: bool) -> str:
    """Distinct experts per step, and how evenly the ranks were loaded."""
    expected = distinct_experts(router.num_experts, router.top_k, steps.tokens)
    drawn = "uniform draws" if uniform else "the router chose, uniform draws would"
    share = steps.distinct / expected if expected else 0.0
    shown = f"[red]{share:.1%}[/]" if uniform and share < LEAST_DISTINCT else f"{share:.1%}"
    return (
        f"distinct experts per layer and step: {steps.distinct:.1f} of {router.num_experts} for "
        f"{steps.tokens:.1f} tokens; {drawn} give {expected:.1f} ({shown}). "
        f"Rows of the fullest rank: {steps.imbalance:.3f} x the mean"
    )
