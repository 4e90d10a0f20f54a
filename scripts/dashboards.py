"""Writes the Grafana dashboards: `scripts/dashboards.py [FOLDER]`, default where the chart packages them.

A panel is one call of a function below; what is the same for all panels stands in these functions.
Expressions ask the recording rules (`epserver:...`) where there is one: dashboard and alert show the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heat_shapes

FOLDER = Path(__file__).parents[1] / "helm" / "ep-server" / "files" / "dashboards"
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
RELEASE = 'namespace=~"$namespace", job=~"$job"'  # of what the recording rules keep
SERVER = RELEASE + ', instance=~"$instance"'
RANK = SERVER + ', rank=~"$rank"'
RUNBOOK = "docs/how-to/alerts.md"
WHOLE = "total|device"  # phases of epserver_step_seconds that are no part of a step
STARTS = {  # a deploy is a start of a process: the annotation stands at the moment of the start
    "name": "Starts",
    "enable": True,
    "iconColor": "blue",
    "datasource": {"type": "prometheus", "uid": "${datasource}"},
    "expr": f"epserver_build_info{{{SERVER}}} * on (namespace, job, instance) group_left ()"
    f" process_start_time_seconds{{{SERVER}}} * 1000",
    "useValueForTime": "on",
    "titleFormat": "{{instance}} starts version {{version}}",
    "tagKeys": "version,model",
    "step": "60s",
}
Panel = timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str = ""


def query(wanted: Query, *, instant: bool = False, shape: str = "time_series") -> prometheus.Dataquery:
    built = prometheus.Dataquery().expr(wanted.expr).legend_format(wanted.legend or "__auto")
    built = built.format(shape)
    return built.instant() if instant else built.range()


def with_queries(panel: Any, queries: Iterable[Query], **how: Any) -> Any:
    panel = panel.datasource(SOURCE)
    for letter, each in zip("ABCDEFGH", queries, strict=False):
        panel = panel.with_target(query(each, **how).ref_id(letter))
    return panel


def lines(
    title: str, unit: str, *queries: Query, about: str = "", stack: bool = False, width: int = 12
) -> Panel:
    """Values over time."""
    panel = timeseries.Panel().title(title).description(about).unit(unit).span(width).height(8).min(0)
    legend = common.VizLegendOptions().display_mode(shapes.LegendDisplayMode.TABLE).show_legend(True)
    legend = legend.placement(shapes.LegendPlacement.BOTTOM).calcs(["lastNotNull", "max"])
    panel = panel.legend(legend).fill_opacity(30 if stack else 5).show_points(shapes.VisibilityMode.NEVER)
    if stack:
        panel = panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL))
    return with_queries(panel, queries)


def number(title: str, unit: str, value: Query, *, about: str = "", bad: float | None = None) -> Panel:
    """One number now; red from `bad` on."""
    panel = stat.Panel().title(title).description(about).unit(unit).span(4).height(4)
    steps = [model.Threshold(value=None, color="green")]
    if bad is not None:
        steps.append(model.Threshold(value=bad, color="red"))
    mode = dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)
    return with_queries(panel.thresholds(mode), [value])


def heat(title: str, unit: str, buckets: Query, *, about: str = "", width: int = 12) -> Panel:
    """How a distribution moves: one column per moment, one row per bucket."""
    color = heatmap.HeatmapColorOptions().mode(heat_shapes.HeatmapColorMode.SCHEME).scheme("Spectral")
    color = color.exponent(0.5).steps(64).reverse(False).fill("dark-orange")
    panel = heatmap.Panel().title(title).description(about).span(width).height(9).calculate(False)
    panel = panel.color(color).y_axis(heatmap.YAxisConfig().unit(unit))
    return with_queries(panel, [buckets], shape="heatmap")


def matrix(title: str, unit: str, cells: Query, *, rows: str, columns: str, about: str) -> Panel:
    """A value for each pair of labels, coloured; one panel per server."""
    grid = {"rowField": rows, "columnField": columns, "valueField": "Value"}
    panel = table.Panel().title(title).description(about).unit(unit).decimals(2).span(24).height(9)
    panel = panel.with_transformation(model.DataTransformerConfig("groupingToMatrix", options=grid))
    panel = panel.cell_options(shapes.TableColoredBackgroundCellOptions())
    panel = panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.CONTINUOUS_BL_YL_RD))
    return with_queries(panel.repeat("instance").max_per_row(2), [cells], instant=True, shape="table")


def rows(title: str, unit: str, wanted: Query, *, hide: Iterable[str] = (), about: str = "") -> Panel:
    """One row per series, labels as columns."""
    hidden = {"excludeByName": dict.fromkeys(["Time", "__name__", *hide], True)}
    panel = table.Panel().title(title).description(about).unit(unit).span(12).height(9)
    panel = panel.with_transformation(model.DataTransformerConfig("organize", options=hidden))
    return with_queries(panel, [wanted], instant=True, shape="table")


def rate(metric: str, labels: str, by: str = "") -> str:
    """Sum of rates over the interval that a panel shows as one point."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({metric}{{{labels}}}[$__rate_interval]))"


def quantiles(histogram: str, labels: str, by: str = "") -> list[Query]:
    """p50 and p99 of a histogram."""
    buckets = rate(f"{histogram}_bucket", labels, by=f"le, {by}" if by else "le")
    name = f"{{{{{by}}}}} " if by else ""
    return [Query(f"histogram_quantile({q}, {buckets})", f"{name}p{q * 100:g}") for q in (0.5, 0.99)]


def mean(histogram: str, labels: str, by: str) -> str:
    """Exact mean of a histogram."""
    return f"{rate(f'{histogram}_sum', labels, by)} / {rate(f'{histogram}_count', labels, by)}"


def recorded(name: str, labels: str = "") -> str:
    """A recording rule, of the chosen releases."""
    return f"epserver:{name}{{{RELEASE}{', ' if labels else ''}{labels}}}"


def overview() -> Iterator[Panel]:
    alerts = f'ALERTS{{alertname=~"EpServer.*", alertstate="firing", {RELEASE}}}'
    yield number("Alerts firing", "none", Query(f"count({alerts}) or vector(0)"), bad=1)
    yield number("Servers", "none", Query(f"count(epserver_build_info{{{SERVER}}})"))
    yield number("Ranks in their group", "none", Query(f"sum(epserver_ep_rank_up{{{SERVER}}})"))
    yield number("Tokens per second", "none", Query(rate("epserver_generated_tokens_total", SERVER)))
    itl, ttft = (recorded("latency_seconds:5m", f'signal="{s}", stat="p99"') for s in ("itl", "ttft"))
    yield number("Between tokens, p99", "s", Query(f"max({itl})"), bad=0.1)
    yield number("First token, p99", "s", Query(f"max({ttft})"), bad=2.5)
    yield lines(
        "Servers by state",
        "none",
        Query(f"sum by (state) (epserver_state{{{SERVER}}})", "{{state}}"),
        about="loading, serving, draining, degraded (a rank is lost and replaced), lost or stopped.",
        stack=True,
        width=8,
    )
    yield lines(
        "Sequences that could still run",
        "none",
        Query(f"epserver_capacity_left{{{SERVER}}}", "{{instance}}"),
        about="Without waiting, if their KV blocks fit.",
        width=8,
    )
    memory = f"sum by (instance, rank, kind) (epserver_rank_memory_bytes{{{SERVER}}})"
    yield lines(
        "Memory of ranks", "bytes", Query(memory, "{{instance}} {{rank}} {{kind}}"), stack=True, width=8
    )
    expiry = f"epserver_tls_expiry_timestamp_seconds{{{SERVER}}} - time()"
    yield lines("Until certificates expire", "s", Query(expiry, "{{instance}} {{file}}"))
    refused = f"increase(epserver_tls_rotations_refused_total{{{SERVER}}}[1h])"
    yield lines("TLS files refused within an hour", "none", Query(refused, "{{instance}}"))
    burn = recorded("slo_burn:ratio", 'window=~"1h|6h"')
    yield lines(
        "Error budget burn",
        "none",
        Query(burn, "{{job}} {{slo}} over {{window}}"),
        about="Times faster than allowed that a budget is spent. Pages at 14.4 in 1 h, warns at 6 in 6 h.",
    )
    yield lines(
        "Requests by status",
        "reqps",
        Query(rate("epserver_requests_total", SERVER, "status"), "{{status}}"),
        stack=True,
    )
    yield lines("First token", "s", *quantiles("epserver_time_to_first_token_seconds", SERVER))
    yield lines("Between tokens", "s", *quantiles("epserver_inter_token_latency_seconds", SERVER))
    yield lines(
        "Tokens of prompts and outputs per second",
        "none",
        Query(rate("epserver_generated_tokens_total", SERVER), "generated"),
        Query(rate("epserver_prompt_tokens_total", SERVER), "prompts"),
    )
    yield lines(
        "Requests in flight",
        "none",
        Query(f"sum(epserver_requests_running{{{SERVER}}})", "with a token"),
        Query(f"sum(epserver_requests_waiting{{{SERVER}}})", "without a token yet"),
        Query(f"sum(epserver_requests_unread{{{SERVER}}})", "ended, not read to the end"),
        stack=True,
    )
    yield lines("Whole request", "s", *quantiles("epserver_request_seconds", SERVER))
    freed = quantiles("epserver_cancel_to_free_seconds", SERVER)
    yield lines("Cancel until its KV blocks are free", "s", *freed)
    share = f"epserver_kv_cache_usage_ratio{{{RANK}}}"
    yield lines("Fullest KV cache", "percentunit", Query(f"max by (instance) ({share})", "{{instance}}"))
    yield lines("Prompt and output lengths, p50", "none", *lengths())
    lost = f"sum by (instance, rank, cause) (increase(epserver_rank_losses_total{{{SERVER}}}[10m])) > 0"
    yield lines(
        "Ranks lost within ten minutes, by cause",
        "none",
        Query(lost, "{{instance}} {{rank}} {{cause}}"),
        about="signal, exit, exception, cuda, hang or node. EpServerRankLostAgain fires at 2 of one rank.",
        width=8,
    )
    phase = "epserver_recovery_phase_seconds"
    pauses = f"sum by (phase) (increase({phase}_sum{{{SERVER}}}[10m]))"
    pauses += f" / sum by (phase) (increase({phase}_count{{{SERVER}}}[10m]) > 0)"
    yield lines(
        "Phases of a recovery, mean of ten minutes",
        "s",
        Query(pauses, "{{phase}}"),
        about="detect ends before the others begin. regroup has load in it, first_token has regroup in it.",
        width=8,
    )
    yield lines(
        "Live ranks, generation and requests continued",
        "none",
        Query(f"sum by (instance) (epserver_ep_rank_up{{{SERVER}}})", "{{instance}} live ranks"),
        Query(f"epserver_generation{{{SERVER}}}", "{{instance}} generation"),
        Query(f"increase(epserver_requests_recovered_total{{{SERVER}}}[10m])", "{{instance}} continued"),
        about="The generation grows by one with each recovery. Continued: requests within ten minutes.",
        width=8,
    )
    yield lines(
        "Nodes by role",
        "none",
        Query(f"sum by (role) (epserver_node_info{{{RELEASE}}})", "{{role}}"),
        about="A leader for each server, and its other nodes. Above, a server is its leader.",
    )
    yield lines(
        "Calls that other nodes passed on",
        "reqps",
        Query(f"{rate('epserver_relayed_requests_total', RELEASE, 'instance')} or vector(0)", "{{instance}}"),
        about="By the node that a call came to. Requests by status, which leaders count, has them too.",
        stack=True,
    )


def lengths() -> Iterator[Query]:
    for name in ("prompt", "output"):
        median = quantiles(f"epserver_request_{name}_tokens", SERVER)[0]
        yield Query(median.expr, name)


def communication() -> Iterator[Panel]:
    latency = "epserver_comm_latency_seconds"
    for op in ("dispatch", "combine"):
        labels = f'{RANK}, op="{op}", part="total"'
        buckets = Query(rate(f"{latency}_bucket", labels, "le"), "{{le}}")
        yield heat(f"{op.capitalize()}: how long it takes", "s", buckets)
    for op in ("dispatch", "combine"):
        labels = f'{RANK}, op="{op}", part!="total"'
        parts = Query(mean(latency, labels, "part"), "{{part}}")
        yield lines(f"{op.capitalize()}: mean of send, wait and the rest", "s", parts, stack=True)
    waits = "epserver_comm_peer_wait_seconds_total"
    yield matrix(
        "Who waits for whom: $instance",
        "percentunit",
        Query(rate(waits, SERVER, "rank, peer")),
        rows="rank",
        columns="peer",
        about="Share of its time that the rank of a row waits for the rank of a column. "
        "A hot column is a slow rank; a hot row is a rank that is early.",
    )
    yield lines(
        "Waiting for a rank, share of all steps",
        "percentunit",
        Query(recorded("comm_peer_wait:share_5m", 'instance=~"$instance"'), "{{instance}} for {{peer}}"),
        about="EpServerSlowRank fires above 5 % that are twice what the others are waited for.",
    )
    for stat_name in ("p50", "p99"):
        wanted = recorded("latency_seconds:5m", f'signal=~"dispatch|combine|vote", stat="{stat_name}"')
        yield lines(f"Per operation, {stat_name}", "s", Query(wanted, "{{job}} {{signal}}"))
    yield from network()
    sent = "epserver_comm_bytes_total"
    yield lines("Bytes sent by a rank", "Bps", Query(rate(sent, RANK, "rank, op"), "{{rank}} {{op}}"))
    busy = rate(f"{latency}_sum", f'{RANK}, op=~"dispatch|combine", part="send"', "op")
    yield lines(
        "Bandwidth while sending",
        "Bps",
        Query(f"{rate(sent, RANK, 'op')} / {busy}", "{{op}}"),
        about="Bytes over the time in the send half, per rank.",
    )
    yield lines(
        "Communication hidden behind computation",
        "percentunit",
        Query(f"epserver_overlap_ratio{{{RANK}}}", "{{instance}} {{rank}}"),
        about="Share of the flight time of dispatch and combine that the rank did not wait.",
    )
    steps = rate("epserver_steps_total", RANK)
    yield lines(
        "Steps run as two micro-batches, steps with the exchange of many rows",
        "percentunit",
        Query(f"{rate('epserver_overlap_steps_total', RANK)} / {steps}", "two micro-batches"),
        Query(f"{rate('epserver_normal_steps_total', RANK)} / {steps}", "many rows"),
    )
    layers = rate("epserver_moe_layers_total", RANK)
    layer = f"{rate('epserver_moe_layer_seconds_total', RANK)} / {layers}"
    yield lines("A MoE layer, from router to residual", "s", Query(layer, "mean"))
    skew = f"epserver_step_skew_seconds{{{SERVER}}}"
    yield lines("Vote: skew between ranks", "s", Query(skew, "{{instance}}"))
    copies = f"{rate('epserver_comm_rows_total', SERVER)} / {rate('epserver_comm_tokens_total', SERVER)}"
    yield lines("Ranks a token is sent to", "none", Query(copies, "rows per token"))
    sleeps = rate("epserver_comm_sleeps_total", RANK, "rank")
    yield lines("Waits that went to sleep", "ops", Query(sleeps, "{{rank}}"))


def network() -> Iterator[Panel]:
    """A row; empty for a server of one node."""
    nic = "{{instance}} node {{node}} {{domain}}"
    share = recorded("nic_wait:share_5m", 'instance=~"$instance"')
    yield lines(
        "Network: waiting at a NIC",
        "percentunit",
        Query(share, nic),
        about="Share of the time that a rank at this NIC and one of another node wait for each other. "
        "EpServerSlowNic fires above 5 % that are 1.3 times what the other NICs have.",
    )
    pace = rate("epserver_nic_bytes_total", SERVER, "instance, node, domain, direction")
    yield lines("Network: bytes through a NIC", "Bps", Query(pace, f"{nic} {{{{direction}}}}"))
    full = rate("epserver_nic_retries_total", SERVER, "instance, node, domain")
    about = "Writes that waited because the NIC had no room for them."
    yield lines("Network: retries of a NIC", "ops", Query(full, nic), about=about)
    pair, by = "{{instance}} {{node}} to {{peer_node}}", "instance, node, peer_node"
    for title, unit, name in (
        ("bytes between nodes", "Bps", "bytes"),
        ("retries between nodes", "ops", "retries"),
    ):
        wanted = rate(f"epserver_network_{name}_total", SERVER, by)
        yield lines(f"Network: {title}", unit, Query(wanted, pair))
    yield lines(
        "Network: waiting between nodes",
        "none",
        Query(rate("epserver_network_wait_seconds_total", SERVER, by), pair.replace("to", "for")),
        about="Ranks of the first node that wait for ranks of the second, added up over pairs.",
    )


def experts() -> Iterator[Panel]:
    tokens = "epserver_expert_tokens_total"
    for scope, what in (("rank", "ranks"), ("expert", "experts")):
        balance = recorded("expert_balance:5m", f'instance=~"$instance", scope="{scope}"')
        yield lines(
            f"Balance over {what}",
            "none",
            Query(balance, "{{instance}}"),
            about="Mean over maximum of the tokens received; 1 is even. Ranks below 0.6 are an alert.",
        )
    received = Query(rate(tokens, RANK, "rank"), "{{rank}}")
    yield lines("Tokens received by a rank, per second", "none", received, stack=True)
    hottest = f"topk(10, {rate(tokens, RANK, 'expert')})"
    yield lines("Ten busiest experts, tokens per second", "none", Query(hottest, "{{expert}}"))
    share = f"{rate(tokens, SERVER, 'expert')} / ignoring (expert) group_left () {rate(tokens, SERVER)}"
    yield rows("Share of the tokens of each expert", "percentunit", Query(f"sort_desc({share})"))
    interval = f"epserver_expert_balancedness{{{SERVER}}}"
    yield lines("Balance in the last half second", "none", Query(interval, "{{instance}} {{scope}}"))
    compute = mean("epserver_step_seconds", f'{RANK}, phase=~"router|experts"', "rank, phase")
    yield lines("Router and experts, mean per step", "s", Query(compute, "{{rank}} {{phase}}"))
    imbalance = Query(f"epserver_expert_imbalance{{{SERVER}}}", "{{layers}}")
    yield lines(
        "Rows of the most loaded rank over the mean",
        "none",
        imbalance,
        about="Where resilience.balance = auto: of all layers, and of the worst one. 1 is even.",
    )
    loads = Query(rate("epserver_expert_moves_total", SERVER), "loaded")
    switches = Query(rate("epserver_expert_placements_total", SERVER), "placements")
    yield lines("Experts moved for balance, per second", "none", loads, switches)
    unused = f"count({rate(tokens, SERVER, 'expert')} == 0) or vector(0)"
    yield lines("Experts that receive no token", "none", Query(unused, "experts"))
    yield matrix(
        "Tokens per second, expert by rank: $instance",
        "none",
        Query(rate(tokens, SERVER, "rank, expert")),
        rows="expert",
        columns="rank",
        about="An expert stands under the rank that owns it.",
    )


def scheduler() -> Iterator[Panel]:
    depth = f"epserver_queue_depth{{{RANK}}}"
    yield lines("Requests waiting on a rank", "none", Query(depth, "{{instance}} {{rank}}"), stack=True)
    full = f"sum by (namespace, job, instance) (epserver_queue_depth{{{SERVER}}})"
    full += f" / on (namespace, job, instance) epserver_queue_limit{{{SERVER}}}"
    yield lines("Queue in use", "percentunit", Query(full, "{{instance}}"))
    yield lines("Time in the queue", "s", *quantiles("epserver_request_queue_seconds", RANK))
    running = f"epserver_rank_running{{{RANK}}}"
    yield lines("Sequences decoding on a rank", "none", Query(running, "{{instance}} {{rank}}"), stack=True)
    steps, tokens = "epserver_steps_total", "epserver_step_tokens_total"
    batch = f"{rate(tokens, RANK, 'rank')} / {rate(steps, RANK, 'rank')}"
    yield lines(
        "Tokens of a step",
        "none",
        Query(batch, "rank {{rank}}"),
        Query(recorded("step_tokens:mean_5m"), "{{job}}, mean over 5 minutes"),
    )
    yield lines("Steps per second", "none", Query(rate(steps, RANK, "rank"), "{{rank}}"))
    idle = f"{rate('epserver_idle_steps_total', RANK, 'rank')} / {rate(steps, RANK, 'rank')}"
    yield lines("Steps without a token of its own", "percentunit", Query(idle, "{{rank}}"))
    padded = f"{rate('epserver_padded_tokens_total', RANK, 'rank')} / {rate(tokens, RANK, 'rank')}"
    yield lines("Padded rows per token", "none", Query(padded, "{{rank}}"))
    usage = f"epserver_kv_cache_usage_ratio{{{RANK}}}"
    yield lines("KV blocks in use", "percentunit", Query(usage, "{{instance}} {{rank}}"))
    yield lines(
        "KV blocks",
        "none",
        *(
            Query(f"sum(epserver_kv_blocks{suffix}{{{RANK}}})", name)
            for suffix, name in (
                ("", "all"),
                ("_used", "used or held"),
                ("_held", "held for other servers"),
                ("_cached", "kept for their prefix"),
            )
        ),
    )
    holds = "epserver_kv_handoff_holds_total"
    yield lines(
        "Holds for other servers that ended",
        "ops",
        Query(rate(holds, RANK, "end"), "{{end}}"),
        about="expired: none came within handoff.hold_seconds. given_up: a sequence needed the room.",
    )
    held = rate("epserver_kv_handoff_hold_seconds_total", RANK)
    yield lines("Hold for other servers, mean", "s", Query(f"{held} / {rate(holds, RANK)}", "held"))
    hits, asked = (rate(f"epserver_prefix_cache_{name}_total", RANK) for name in ("hits", "queries"))
    from_host = rate("epserver_prefix_cache_host_hits_total", RANK)
    yield lines(
        "Prompt tokens found in the prefix cache",
        "percentunit",
        Query(f"{hits} / {asked}", "share"),
        Query(f"{from_host} / {asked}", "share that only the host tier held"),
    )
    yield lines(
        "KV blocks between cache and host tier",
        "Bps",
        *(Query(rate(f"epserver_kv_host_{name}_bytes_total", RANK), name) for name in ("saved", "loaded")),
    )
    events = (
        Query(rate("epserver_preemptions_total", RANK), "preemptions"),
        Query(rate("epserver_parks_total", RANK), "parks"),
        Query(rate("epserver_requests_admitted_total", SERVER), "requests admitted"),
    )
    yield lines("Preemptions, parks and admissions", "ops", *events)
    phases = mean("epserver_step_seconds", f'{RANK}, phase!~"{WHOLE}"', "phase")
    yield lines("Where a step goes, mean", "s", Query(phases, "{{phase}}"), stack=True)
    yield lines("Step", "s", *quantiles("epserver_step_seconds", f'{RANK}, phase="total"'))
    whole = mean("epserver_step_seconds", f'{RANK}, phase=~"{WHOLE}"', "rank, phase")
    yield lines(
        "Step, and how long of it the device was busy, mean",
        "s",
        Query(whole, "{{rank}} {{phase}}"),
        about="GPUs tell it where metrics.device_phases is set. The rest of total they wait for the host.",
    )
    parts = [quantiles(f"epserver_request_{name}_seconds", SERVER)[0] for name in ("prefill", "decode")]
    named = zip(parts, ("prefill", "decode"), strict=True)
    yield lines("Prefill and decode of a request, p50", "s", *(Query(q.expr, name) for q, name in named))


def regression() -> Iterator[Panel]:
    signals = {
        "dispatch": "Dispatch",
        "combine": "Combine",
        "itl": "Between tokens",
        "ttft": "First token",
    }
    ratio = recorded("latency:ratio", 'stat="mean"')
    yield lines(
        "Now over expected, mean",
        "none",
        Query(ratio, "{{job}} {{signal}} against {{window}}"),
        about="1 is as fast as the same load was: in the median of the day, or week, until 30 minutes ago.",
    )
    p99 = recorded("latency:ratio", 'stat="p99"')
    yield lines("Now over expected, p99", "none", Query(p99, "{{job}} {{signal}} against {{window}}"))
    for signal, title in signals.items():
        for stat_name in ("mean", "p99"):
            labels = f'signal="{signal}", stat="{stat_name}"'
            yield lines(
                f"{title}, {stat_name}: today and expected",
                "s",
                Query(recorded("latency_seconds:by_band", labels), "{{job}} now, {{batch_band}}"),
                Query(recorded("latency_seconds:expected", labels), "{{job}} {{window}}, {{batch_band}}"),
            )
    yield lines(
        "Load",
        "none",
        Query(recorded("step_tokens:mean_5m"), "{{job}} tokens per rank and step"),
        about="Latencies are compared within a band of load, from a power of two to the next.",
    )
    yield lines(
        "Samples behind a latency",
        "none",
        Query(recorded("latency_samples:5m"), "{{job}} {{signal}}"),
        about="Alerts ask for 1000 of dispatch and combine, 500 between tokens, 100 first tokens.",
    )
    phases = mean("epserver_step_seconds", f'{SERVER}, phase!~"{WHOLE}"', "phase")
    yield lines("Where a step goes, mean of all ranks", "s", Query(phases, "{{phase}}"), stack=True)
    parts = {name: f"epserver_request_{name}_seconds" for name in ("queue", "prefill")}
    to_first = (Query(mean(histogram, SERVER, ""), name) for name, histogram in parts.items())
    yield lines("Until the first token, mean", "s", *to_first, stack=True)
    yield rows("Slower or faster, all figures", "none", Query(f"sort_desc({recorded('latency:ratio')})"))
    versions = f"epserver_build_info{{{SERVER}}}"
    yield rows("Versions that run", "none", Query(versions), hide=["Value"])


DASHBOARDS = {
    "overview": ("Overview", "Service levels, throughput and load.", overview),
    "communication": ("Communication", "Dispatch, combine and who waits for whom.", communication),
    "experts": ("Experts", "How evenly experts and ranks are used.", experts),
    "scheduler": ("Scheduler", "Queues, batches, KV cache and the phases of a step.", scheduler),
    "regression": ("Regression", "Latency at equal load, today against the past.", regression),
}


def variables() -> Iterator[Any]:
    """Choices at the top. A release is a job; its All means the jobs that serve the chosen models."""
    yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    chosen = 'epserver_build_info{namespace=~"$namespace", model=~"$model"}'
    choices = (
        ("namespace", "Namespace", "label_values(epserver_build_info, namespace)", ".*"),
        ("model", "Model", 'label_values(epserver_build_info{namespace=~"$namespace"}, model)', ".*"),
        ("job", "Release", f"label_values({chosen}, job)", None),
        ("instance", "Server", f"label_values(epserver_build_info{{{RELEASE}}}, instance)", None),
        ("rank", "Rank", f"label_values(epserver_ep_rank_up{{{SERVER}}}, rank)", ".*"),
    )
    for name, label, wanted, everything in choices:
        choice = dashboard.QueryVariable(name).label(label).query(wanted).datasource(SOURCE)
        choice = choice.multi(True).include_all(True).refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        choice = choice.current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))
        choice = choice.sort(model.VariableSort.NATURAL_ASC)
        yield choice.all_value(everything) if everything else choice


def build(name: str) -> str:
    """One dashboard as JSON text."""
    title, about, panels = DASHBOARDS[name]
    made = dashboard.Dashboard(f"ep_server / {title}").uid(f"epserver-{name}").description(about)
    made = made.tags(["ep-server"]).refresh("30s").readonly().tooltip(model.DashboardCursorSync.CROSSHAIR)
    made = made.time("now-24h" if name == "regression" else "now-1h", "now")
    # First: the chart makes it absolute, or drops it where metrics.runbookBase is empty.
    runbook = dashboard.DashboardLink("Runbook").type(model.DashboardLinkType.LINK).url(RUNBOOK)
    made = made.link(runbook.icon("doc").target_blank(True))
    others = dashboard.DashboardLink("Dashboards").type(model.DashboardLinkType.DASHBOARDS)
    made = made.link(others.tags(["ep-server"]).include_vars(True).keep_time(True).as_dropdown(True))
    for variable in variables():
        made = made.with_variable(variable)
    for number_of, panel in enumerate(panels(), start=1):
        made = made.with_panel(panel.id(number_of))
    tree = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    tree["annotations"] = {"list": [STARTS]}  # the library's type lacks fields of Prometheus annotations
    return json.dumps(tree, indent=1, sort_keys=True) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the Grafana dashboards.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="default: the chart's")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in DASHBOARDS:
        (folder / f"{name}.json").write_text(build(name), encoding="utf-8")


if __name__ == "__main__":
    main()
