"""Time of a step by phase, its lower bounds, and how evenly the experts were loaded. Pure.

Computed from two cumulative reports of every rank. Units: seconds per step unless stated otherwise, bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ep_server.models.families.spec import GqaSpec, ModelSpec
from ep_server.models.footprint import footprint
from ep_server.models.sizes import Dtype, cache_dtype, kv_block_bytes
from ep_server.models.timers import MOE_PHASES
from ep_server.observability.intervals import names_of
from ep_server.observability.quantiles import NANO
from ep_server.records import RankStatistics

TIMED_EVERY = 32  # on GPUs, one step in this many has time stamps, which cost it a few percent
PHASES = ("attention", "router", "dispatch", "experts", "combine", "sample")
Reports = Mapping[int, RankStatistics]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one rank that give the bounds, in bytes per second. memory: reads. link: to other ranks.

    packed: weights in the format of CPU ranks. kv_dtype: as ModelConfig.kv_dtype.
    """

    memory: float
    link: float
    packed: bool = True
    kv_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Captured decode steps. seconds, device: as in Steps. tokens: of all ranks."""

    count: int
    seconds: float
    device: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps between two reports: means per step and over ranks.

    phases: seconds by name; they add up to `seconds`. `wait`: in the vote, for slower ranks. `host`: plan and
      publish. `rest`: outside the phases. With device timing, phases are means of the timed steps, `rest` is
      the mean of all steps minus that of the timed ones (it may be negative), and `idle` is the time that the
      device waited for the host.
    active: by rank, experts of a layer that received a token. sent: by operation, bytes to other ranks.
    tokens: of all ranks. load: by rank, rows that the experts of all layers received.
    overlapped: share of steps with two micro-batches. device: busy seconds, with device timing.
    decode: captured decode steps alone, with device timing.
    """

    count: int
    seconds: float
    phases: Mapping[str, float]
    tokens: float
    active: tuple[float, ...]
    load: tuple[int, ...]
    sent: Mapping[str, float]
    overlapped: float = 0.0
    device: float | None = None
    decode: DecodeSteps | None = None

    @property
    def distinct(self) -> float:
        """Distinct experts of a layer in a step, over all ranks."""
        return sum(self.active)

    @property
    def imbalance(self) -> float:
        """Rows of the fullest rank over the mean; 1 is even, 0 means that there were none."""
        return max(self.load) * len(self.load) / sum(self.load) if any(self.load) else 0.0

    def moe_layer(self, sparse_layers: int) -> float:
        """Seconds of a MoE layer, from router to residual."""
        return moe_seconds(self.phases, sparse_layers)

    @property
    def host_share(self) -> float:
        """Share of a step that waits for the host; 0 if noise hides it."""
        share = self.phases["host" if self.device is None else "idle"] / self.seconds if self.seconds else 0.0
        return min(max(share, 0.0), 1.0)


def moe_seconds(phases: Mapping[str, float], sparse_layers: int) -> float:
    """Seconds of a MoE layer. phases: of a step, or their bounds; those that are missing take no time."""
    names = (phase.name.lower() for phase in MOE_PHASES)
    return sum(phases.get(name, 0.0) for name in names) / max(sparse_layers, 1)


def steps_between(before: Reports, after: Reports, sparse_layers: int) -> Steps | None:
    """Steps between two reports of every rank; None if there were none."""
    counts = [_added(before, after, rank, "counters", "run_steps") for rank in after]
    count = min(counts, default=0)
    if count < 1:
        return None
    ranks = len(after)

    def per_step(name: str, of: str) -> float:
        spent = sum(_added(before, after, rank, "sums", name) for rank in after)
        steps = sum(_added(before, after, rank, "counters", of) for rank in after)
        return spent * NANO / steps if steps else 0.0

    total = per_step("step/total", "run_steps")
    device = per_step("step/device", "device_steps") or None
    names = {name for rank in after.values() for name in rank.counters if name.startswith("bytes/")}
    return Steps(
        count=count,
        seconds=total,
        phases=_phases(per_step, total, device),
        tokens=sum(_added(before, after, rank, "counters", "tokens") for rank in after) / count,
        active=tuple(
            _added(before, after, rank, "counters", "experts_active") / count / max(sparse_layers, 1)
            for rank in sorted(after)
        ),
        load=tuple(_rows(after, rank) - _rows(before, rank) for rank in sorted(after)),
        sent={
            name.removeprefix("bytes/"): sum(_added(before, after, r, "counters", name) for r in after)
            / (count * ranks)
            for name in names
        },
        overlapped=sum(_added(before, after, r, "counters", "overlap_steps") for r in after) / sum(counts),
        device=device,
        decode=_decode_steps(before, after, per_step) if device else None,
    )


def less(long: Steps, short: Steps) -> Steps | None:
    """The steps of a longer run minus those of a shorter one of the same requests; None if none are left.

    Both have the same prefill, so decoding is left. With device timing, phases are of captured decode steps:
    then the times of the longer run are taken as they are, since prefill steps of the runs differ in content.
    """
    count = long.count - short.count
    if count < 1:
        return None

    def beyond(of_long: float, of_short: float) -> float:
        return (of_long * long.count - of_short * short.count) / count

    seconds, device = beyond(long.seconds, short.seconds), None
    phases = {
        name: max(beyond(spent, short.phases.get(name, 0.0)), 0.0) for name, spent in long.phases.items()
    }
    tokens = beyond(long.tokens, short.tokens)
    if long.decode is not None:
        seconds, device, tokens = long.decode.seconds, long.decode.device, long.decode.tokens
    elif long.device is not None:
        device = beyond(long.device, short.device or 0.0)
    if device is not None:
        phases = _on_device(long.phases, seconds, device)
    return Steps(
        count=count if long.decode is None else long.decode.count,
        seconds=seconds,
        phases=phases,
        tokens=tokens,
        active=tuple(beyond(a, b) for a, b in zip(long.active, short.active, strict=True)),
        load=tuple(a - b for a, b in zip(long.load, short.load, strict=True)),
        sent={name: beyond(long.sent[name], short.sent.get(name, 0.0)) for name in long.sent},
        overlapped=min(max(beyond(long.overlapped, short.overlapped), 0.0), 1.0),
        device=device,
    )


def _phases(per_step: Callable[[str, str], float], total: float, device: float | None) -> dict[str, float]:
    """Seconds by name. per_step: mean of a sum over the steps of a counter, both by name."""
    if device is not None:
        return _on_device({name: per_step(f"step/{name}", "timed_steps") for name in PHASES}, total, device)
    spent = {name: per_step(f"step/{name}", "run_steps") for name in (*PHASES, "vote", "plan", "publish")}
    phases = {name: spent[name] for name in PHASES}
    phases |= {"wait": spent["vote"], "host": spent["plan"] + spent["publish"]}
    return phases | {"rest": max(total - sum(phases.values()), 0.0)}


def _on_device(timed: Mapping[str, float], seconds: float, busy: float) -> dict[str, float]:
    """Phases of the timed steps, `rest` and `idle`. seconds, busy: means over all steps."""
    phases = {name: timed[name] for name in PHASES}
    return {**phases, "rest": busy - sum(phases.values()), "idle": seconds - busy}


def _decode_steps(
    before: Reports, after: Reports, per_step: Callable[[str, str], float]
) -> DecodeSteps | None:
    """Means over ranks and captured decode steps; None if there were none."""
    count = min(_added(before, after, rank, "counters", "decode_steps") for rank in after)
    if count < 1:
        return None
    return DecodeSteps(
        count,
        per_step("step/decode", "decode_steps"),
        per_step("step/decode_device", "decode_device_steps"),
        sum(_added(before, after, rank, "counters", "decode_tokens") for rank in after) / count,
    )


def bounds(spec: ModelSpec, dtype: Dtype, steps: Steps, context: float, rates: Rates) -> dict[str, float]:
    """Lower bound of each phase: its bytes at the given rates. Phases without a known bound are absent.

    Args:
        context: tokens in the KV cache of a sequence, mean.
    """
    weights = footprint(spec, dtype, packed=rates.packed)
    fixed = weights.replicated
    window = spec.attention.window if isinstance(spec.attention, GqaSpec) else 0
    ranks = len(steps.active)
    per_token = kv_block_bytes(spec, 1, cache_dtype(dtype, rates.kv_dtype))
    cached = steps.tokens / ranks * min(context, window or context) * per_token
    # Experts without tokens are not read. The others wait for the rank with the most active experts.
    experts = max(steps.active) * weights.expert * weights.sparse_layers
    # A tied head has no matrix of its own unless weights are packed.
    head = fixed.get("head", fixed["embedding"])
    read = {
        "attention": fixed["attention"] + fixed["norms"] + cached,
        "router": fixed["router"],
        "experts": experts + fixed.get("shared experts", 0) + fixed.get("dense FFN", 0),
        "sample": head,
    }
    least = {name: number / rates.memory for name, number in read.items()}
    for op in ("dispatch", "combine"):
        if sent := sum(steps.sent.get(name, 0.0) for name in names_of(op)):
            least[op] = sent / rates.link
    return least


def _added(before: Reports, after: Reports, rank: int, kind: str, name: str) -> int:
    now: int = getattr(after[rank], kind).get(name, 0)
    then: int = getattr(before[rank], kind).get(name, 0) if rank in before else 0
    return now - then


def _rows(reports: Reports, rank: int) -> int:
    return sum(reports[rank].expert_tokens.values()) if rank in reports else 0
