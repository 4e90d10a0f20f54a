"""What a benchmark found, as tables for people. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ep_server.cli.bench.breakdown import Steps
from ep_server.cli.bench.offline_plan import Result
from ep_server.models.families.spec import RouterSpec
from ep_server.ranks.sizing import distinct_experts

LATENCIES = {
    "time_to_first_token": "time to first token",
    "inter_token_latency": "inter token latency",
    "time_per_output_token": "mean gap of a request",
    "end_to_end": "end to end",
    "send_delay": "sent late by",
}
COLUMNS = ("mean", "p50", "p90", "p99", "max")
LEAST_DISTINCT = 0.95  # of what uniform draws give; less, and fewer weights were read than should be
PHASE_NAMES = {
    "wait": "wait for ranks",
    "host": "host: plan, publish",
    "rest": "run, beside the phases",
    "idle": "idle: waits for the host",
}


def online(console: Console, found: Mapping[str, Any], title: str) -> None:
    """Latencies, throughput, goodput and errors. found: of report.summarise()."""
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
        console.print(f"[red]{count} ended with {status}{', the first: ' * bool(why)}{escape(why)}[/]")


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


def offline(console: Console, results: Sequence[Result], title: str) -> None:
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


def step(console: Console, steps: Steps, least: Mapping[str, float], title: str) -> None:
    """Where a step's time goes. least: bounds by phase, seconds; empty where none is known."""
    table = Table("of a step", title=title)
    for name in ("ms", "share", *(("bound, ms", "of its bound") if least else ())):
        table.add_column(name, justify="right")
    names = PHASE_NAMES if steps.device is None else PHASE_NAMES | {"rest": "all steps less the timed ones"}
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


def overlap_line(steps: Steps, mode: str) -> str:
    """How often steps were cut in two, and how much of a step the host cost, in words. mode: configured."""
    told = "plan and publish" if steps.device is None else "first to last stamp of the device subtracted"
    return (
        f"two micro-batches in {steps.overlapped:.1%} of the steps (overlap {mode}); "
        f"host share of a step {steps.host_share:.1%} ({told})"
    )


def experts_line(steps: Steps, router: RouterSpec, *, uniform: bool) -> str:
    """Distinct experts and balance, in words."""
    expected = distinct_experts(router.num_experts, router.top_k, steps.tokens)
    drawn = "uniform draws" if uniform else "the router chose, uniform draws would"
    share = steps.distinct / expected if expected else 0.0
    shown = f"[red]{share:.1%}[/]" if uniform and share < LEAST_DISTINCT else f"{share:.1%}"
    return (
        f"distinct experts per layer and step: {steps.distinct:.1f} of {router.num_experts} for "
        f"{steps.tokens:.1f} tokens; {drawn} give {expected:.1f} ({shown}). "
        f"Rows of the fullest rank: {steps.imbalance:.3f} x the mean"
    )
