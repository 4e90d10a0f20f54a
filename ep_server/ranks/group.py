"""Plans a group of ranks from the configuration and the checkpoint's headers, before any rank exists.

Decides what all ranks must agree on: expert placement, the exchange, KV blocks, threads. Refuses a group that
this host cannot hold, and gives the numbers. Starts nothing. Units: bytes, blocks, tokens.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ep_server.config import Config, SchedulerConfig
from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction
from ep_server.exchange.factory import Topology, device_memory, replaces_ranks
from ep_server.exchange.segment import available_memory
from ep_server.exchange.spec import DeviceMemory, group_bytes
from ep_server.models.families import ModelSpec
from ep_server.models.footprint import footprint
from ep_server.models.inspect import inspect_checkpoint, inspect_config
from ep_server.models.kv_memory import KvMemoryLayout
from ep_server.models.shadow import ShadowLayout
from ep_server.models.sizes import Dtype, cache_dtype, context_limit, kv_block_bytes, serving_dtype
from ep_server.ranks.gpu_memory import least_free_memory
from ep_server.ranks.slots import (
    SpareSlots,
    most_ranks,
    num_ranks,
    placement_at_start,
    slot_bytes,
    slots_per_rank,
    with_spares,
)
from ep_server.scheduler.placement import Placement, place_experts, slots_lacking, slots_needed

SPIN_US = 50  # longer than a dispatch among ranks in step, far shorter than a time slice
# Sequences of a rank. With fewer, sending all rows through host memory is faster (docs/design-notes).
HIERARCHICAL_FROM = 64
GPU_SPARE_SHARE = 2 / 3  # the same of a GPU's memory, which has fewer other uses
SPARE_SHARE = 0.5  # of the memory beside weights, exchange and processes, for automatic spare slots
SHADOW_SHARE = {"on": 1.0, "auto": 0.5}  # of the host memory available that the host shadow may take
PROCESS_BYTES = 192 << 20  # a rank's own memory beside weights and KV cache: interpreter, torch, activations


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The plan that the ranks of a group start from.

    exchange: of rank 0; the others differ in `rank` only. kv_blocks, threads: of each rank of this host;
      kv_blocks 0 = as the memory of its GPU allows.
    weight_bytes: by rank, over all hosts, empty slots included.
    spares: expert slots. placement: of experts in slots; None where they stay.
    unused: names unused parts of the checkpoint; empty if none.
    shadow: of experts in host memory, if there is one. kv: of a KV cache in host memory.
    kv_keeps: caches of lost ranks that memory has room for, beside those of all ranks.
    """

    exchange: ExchangeSpec
    kv_blocks: int
    threads: int
    weight_bytes: tuple[int, ...]
    spares: SpareSlots
    placement: Placement | None = None
    unused: str = ""
    shadow: ShadowLayout | None = None
    kv: KvMemoryLayout | None = None
    kv_keeps: int = 0


def plan_group(config: Config, available: int | None = None) -> GroupPlan:
    """Reads config.json and, unless weights are made up, the shards' headers.

    Args:
        available: memory the group may take; None = the free memory of this host, and of its GPUs for ranks
          on GPUs.
    Raises: CheckpointError; ConfigError; StartupError if the model does not fit into memory.
    """
    model, on_cpu = config.model, config.parallel.device == "cpu"
    if on_cpu and model.kv_dtype != "auto":
        raise ConfigError("model.kv_dtype", model.kv_dtype, "auto where parallel.device = cpu")
    if on_cpu and model.attention != "auto":
        raise ConfigError("model.attention", model.attention, "auto where parallel.device = cpu")
    found = inspect_config(model.path) if model.load_format == "dummy" else inspect_checkpoint(model.path)
    memory = available_memory() if available is None else available
    pinned = 0 if on_cpu else config.parallel.ranks * host_bytes(config, found.spec)
    if pinned > memory:
        raise StartupError(
            f"scheduler.kv_host_gib = {config.scheduler.kv_host_gib:g}: {_gib(pinned)} for "
            f"{config.parallel.ranks} ranks must fit into the {_gib(memory)} of memory available"
        )
    shadow = None if on_cpu else _shadow_that_fits(config, found.spec, memory - pinned)
    if not on_cpu and available is None:
        memory = config.parallel.ranks * least_free_memory()
    plan = plan_ranks(config, found.spec, memory, packed=on_cpu)
    return replace(plan, unused=str(found.unused), shadow=plan.shadow if on_cpu else shadow)


def plan_ranks(config: Config, spec: ModelSpec, available: int, *, packed: bool = True) -> GroupPlan:
    """As plan_group, for a model that has only its config.json.

    Args:
        available: memory for the ranks of this host. packed: weights as CPU ranks keep them, or as they are.
    Raises: ConfigError; StartupError.
    """
    ranks, scheduler = config.parallel.ranks, config.scheduler
    context = context_limit(spec, config.model.max_context)
    config = with_spares(config, spares_that_fit(config, spec, available, packed=packed))
    exchange = exchange_spec(config, spec, 0)
    topology_of(config, exchange)  # refuses before anything is started
    dtype = serving_dtype(spec, config.model.dtype)
    spares = SpareSlots(
        int(config.resilience.spare_slots),
        slots_per_rank(config, spec),
        spec.router.num_experts,
        slot_bytes(config, spec, packed=packed),
    )
    weights = weight_bytes(config, spec, exchange, packed=packed)
    here = sum(weights[rank] for rank in local_ranks(config))
    shared = exchange_bytes(config, exchange, packed=packed)
    threads = config.parallel.threads_per_rank or max(1, usable_cores() // ranks)
    placement, shadow = placement_at_start(config, spec), shadow_of(config, spec, packed=packed)
    if config.parallel.device == "cuda":  # each rank knows its GPU, and sizes its cache
        return GroupPlan(exchange, scheduler.kv_blocks, threads, weights, spares, placement, shadow=shadow)
    processes = ranks + standby_processes(config)
    host = ranks * host_bytes(config, spec) if packed else 0  # a GPU's memory holds none of it
    fixed = _fixed_bytes(config, spec, exchange, packed=packed)
    cached = cache_dtype(dtype, config.model.kv_dtype)
    block = kv_block_bytes(spec, scheduler.block_size, cached)
    blocks = scheduler.kv_blocks
    if not blocks:
        share = max(0, available - fixed) * scheduler.kv_fraction
        blocks = min(int(share / (ranks * block)), useful_blocks(scheduler, context))
    if not blocks or fixed + ranks * blocks * block > available:
        most = max(0, available - fixed) // (ranks * block)
        gib, left = scheduler.kv_host_gib, (available - fixed + host) / ranks / 2**30
        unit = "process" if processes == 1 else "processes"
        raise StartupError(
            (f"scheduler.kv_host_gib = {gib:g}: must be less than {left:.2f}: " if 0 < left <= gib else "")
            + f"the model does not fit: {_gib(here)} of weights, {_gib(shared)} of "
            f"exchange, {_gib(ranks * max(blocks, 1) * block)} of KV cache"
            + (f", {_gib(host)} of host tier (scheduler.kv_host_gib)" if host else "")
            + (f", {_gib(shadow.nbytes)} of host shadow (resilience.shadow)" if shadow is not None else "")
            + " and "
            f"{_gib(processes * PROCESS_BYTES)} for {processes} {unit} need more than the "
            f"{_gib(available)} of memory available"
            + (f"; scheduler.kv_blocks = {blocks}: must be at most {most}, or 0" if blocks and most else "")
        )
    kv = KvMemoryLayout.of(spec, blocks, scheduler.block_size, cached)
    keeps = max(0, min(ranks, (available - fixed) // kv.nbytes - ranks))
    return GroupPlan(
        exchange, blocks, threads, weights, spares, placement, shadow=shadow, kv=kv, kv_keeps=keeps
    )


def _fixed_bytes(config: Config, spec: ModelSpec, exchange: ExchangeSpec, *, packed: bool) -> int:
    """Memory of this host's ranks beside their KV blocks."""
    ranks = config.parallel.ranks
    weights = weight_bytes(config, spec, exchange, packed=packed)
    here = sum(weights[rank] for rank in local_ranks(config))
    processes = ranks + standby_processes(config)
    host = ranks * host_bytes(config, spec) if packed else 0  # a GPU's memory holds none of it
    shadow = shadow_of(config, spec, packed=True) if packed else None
    host += 0 if shadow is None else shadow.nbytes
    return here + exchange_bytes(config, exchange, packed=packed) + host + processes * PROCESS_BYTES


def shadow_of(config: Config, spec: ModelSpec, *, packed: bool) -> ShadowLayout | None:
    """The host shadow of resilience.shadow; with auto on GPUs if it fits. Raises: ConfigError."""
    given = config.resilience.shadow
    usable = given != "off" and outlives_losses(config) and _replaces_ranks(config, spec)
    if given == "on" and not usable:
        allowed = "off or auto, unless several ranks on one node, on_rank_loss = recover, no float32 on GPUs"
        raise ConfigError("resilience.shadow", given, allowed)
    if not usable or (given == "auto" and packed):
        return None
    return ShadowLayout.of(spec, serving_dtype(spec, config.model.dtype), packed=packed)


def _shadow_that_fits(config: Config, spec: ModelSpec, memory: int) -> ShadowLayout | None:
    """Of GPU ranks, in so much host memory. Raises: ConfigError; StartupError if on does not fit."""
    shadow = shadow_of(config, spec, packed=False)
    if shadow is None or shadow.nbytes <= memory * SHADOW_SHARE[config.resilience.shadow]:
        return shadow
    if config.resilience.shadow == "on":
        raise StartupError(
            f"resilience.shadow = on: {_gib(shadow.nbytes)} for a copy of all experts must fit into the "
            f"{_gib(memory)} of host memory available; auto or off do without"
        )
    return None


def _replaces_ranks(config: Config, spec: ModelSpec) -> bool:
    """A new process can take the place of a lost rank while the others go on."""
    plain = with_spares(config, 0)
    exchange = exchange_spec(plain, spec, 0)
    return replaces_ranks(topology_of(plain, exchange), exchange)


def spares_that_fit(config: Config, spec: ModelSpec, available: int, *, packed: bool = True) -> int:
    """resilience.spare_slots resolved: slots per layer and rank.

    Raises: ConfigError for spare slots of ranks that cannot use them.
    """
    given, ranks, plain = config.resilience.spare_slots, num_ranks(config), with_spares(config, 0)
    exchange, replaces = exchange_spec(plain, spec, 0), _replaces_ranks(config, spec)
    usable = outlives_losses(config) and replaces
    if most_ranks(config) > ranks and not replaces:
        allowed = "0 or parallel.ranks for float32 on GPUs"
        raise ConfigError("parallel.max_ranks", config.parallel.max_ranks, allowed)
    if given != "auto":
        if given != "0" and not (usable or ranks == 1):
            allowed = "auto or 0, unless cluster.nodes = 1, on_rank_loss = recover and no float32 on GPUs"
            raise ConfigError("resilience.spare_slots", given, allowed)
        return int(given)
    experts = spec.router.num_experts
    wanted = slots_lacking(experts, slots_needed(experts, ranks), ranks)
    if not usable or not wanted:
        return 0
    left = available - _fixed_bytes(plain, spec, exchange, packed=packed)
    share = SPARE_SHARE if config.parallel.device == "cpu" else GPU_SPARE_SHARE
    fits = ranks * wanted * slot_bytes(config, spec, packed=packed) <= left * share
    return wanted if fits else 0


def host_blocks(config: Config, spec: ModelSpec) -> int:
    """KV blocks in the host tier of one rank; 0 = it has none.

    Raises: ConfigError if it holds no block, or if no prefix is ever reused.
    """
    scheduler, model = config.scheduler, config.model
    if not scheduler.kv_host_gib:
        return 0
    if not scheduler.prefix_cache or model.routing != "router":
        allowed = "0 unless scheduler.prefix_cache = true and model.routing = router"
        raise ConfigError("scheduler.kv_host_gib", scheduler.kv_host_gib, allowed)
    cached = cache_dtype(serving_dtype(spec, model.dtype), model.kv_dtype)
    block = kv_block_bytes(spec, scheduler.block_size, cached)
    blocks = int(scheduler.kv_host_gib * 2**30) // block
    if not blocks:
        allowed = f"0, or at least a KV block of {block} bytes"
        raise ConfigError("scheduler.kv_host_gib", scheduler.kv_host_gib, allowed)
    return blocks


def host_bytes(config: Config, spec: ModelSpec) -> int:
    """Memory of the host tier of one rank. Raises: as host_blocks()."""
    cached = cache_dtype(serving_dtype(spec, config.model.dtype), config.model.kv_dtype)
    return host_blocks(config, spec) * kv_block_bytes(spec, config.scheduler.block_size, cached)


def weight_bytes(config: Config, spec: ModelSpec, exchange: ExchangeSpec, *, packed: bool) -> tuple[int, ...]:
    """Bytes of each rank's weights. packed: as CPU ranks keep them, else as stored."""
    held = footprint(spec, serving_dtype(spec, config.model.dtype), packed=packed)
    return held.rank_bytes(exchange.placement, exchange.num_ranks)


def standby_processes(config: Config) -> int:
    """Processes without weights that this host keeps, to take the place of lost ranks sooner."""
    resilience, on_cpu = config.resilience, config.parallel.device == "cpu"
    if config.cluster.nodes > 1 and on_cpu and resilience.on_rank_loss == "recover":
        return min(resilience.standby, config.parallel.ranks)  # all ranks start again
    return resilience.standby if outlives_losses(config) and most_ranks(config) > 1 else 0


def outlives_losses(config: Config) -> bool:
    """Ranks keep their processes when another one is lost, if their exchange can replace ranks."""
    return config.resilience.on_rank_loss == "recover" and config.cluster.nodes == 1


def local_ranks(config: Config) -> range:
    """Ranks of this host that start, among those of all."""
    first = max(config.cluster.node_rank, 0) * config.parallel.ranks if config.cluster.nodes > 1 else 0
    return range(first, first + config.parallel.ranks)


def hosts_of(config: Config) -> tuple[int, ...]:
    """The host of each rank that there can be."""
    if config.cluster.nodes == 1:
        return (0,) * most_ranks(config)
    return tuple(rank // config.parallel.ranks for rank in range(num_ranks(config)))


def many_rows(config: Config) -> bool:
    """Whether steps may use the exchange of many rows."""
    return config.exchange.mode != "low_latency"


def gpu_exchange(config: Config, exchange: ExchangeSpec) -> DeviceMemory | None:
    """What the exchange takes of each GPU; see factory.device_memory()."""
    topology = replace(topology_of(config, exchange), gpus=True)
    return device_memory(topology, exchange, many=many_rows(config))


def exchange_bytes(config: Config, exchange: ExchangeSpec, *, packed: bool = True) -> int:
    """Memory of the exchange on this host, or on its GPUs if weights are not packed.

    With several hosts, each rank also has an outbox.
    """
    if config.cluster.nodes == 1:
        on_gpu = None if packed else gpu_exchange(config, exchange)
        return group_bytes(exchange) if on_gpu is None else config.parallel.ranks * on_gpu.held
    return 2 * group_bytes(exchange) // config.cluster.nodes


def topology_of(config: Config, spec: ExchangeSpec) -> Topology:
    """Where the ranks are, and whether rows stay on NVLink inside a node if there are several.

    Raises: ConfigError if that is configured but not possible.
    """
    return Topology(hosts_of(config), config.parallel.device == "cuda", _hierarchical(config, spec))


def _hierarchical(config: Config, spec: ExchangeSpec) -> bool:
    asked, float32 = config.exchange.between_nodes, spec.payload == Payload.FP32
    possible = between_gpus(config) and not float32
    if asked == "hierarchical" and not possible:
        allowed = "auto or flat, unless there are several nodes with GPUs and rows are not float32"
        raise ConfigError("exchange.between_nodes", asked, allowed)
    # Reduction source promises the same bits for every number of ranks. Sums in two parts would break that.
    plain = config.parallel.ranks > 1 and spec.reduction is Reduction.RANK
    fits = plain and config.scheduler.max_running >= HIERARCHICAL_FROM
    return possible and (asked == "hierarchical" or (asked == "auto" and fits))


def check_device_memory(config: Config) -> None:
    """Raises ConfigError if NICs shall access GPU memory, but there are no GPUs or no other nodes."""
    if config.exchange.device_memory == "hmem" and not between_gpus(config):
        allowed = "auto or host, unless there are several nodes with GPUs"
        raise ConfigError("exchange.device_memory", "hmem", allowed)


def between_gpus(config: Config) -> bool:
    """Whether rows travel between GPUs of several nodes."""
    return config.parallel.device == "cuda" and config.cluster.nodes > 1


def exchange_spec(config: Config, spec: ModelSpec, rank: int) -> ExchangeSpec:
    """The exchange of one rank; the same on all but for `rank`.

    Raises: ConfigError for rows that the experts of GPU ranks do not support, or that no NIC can send.
    """
    check_device_memory(config)
    settings, experts = config.exchange, spec.router.num_experts
    ranks, slots = most_ranks(config), slots_per_rank(config, spec)
    dtype = serving_dtype(spec, config.model.dtype)
    auto = Payload.FP32 if dtype is Dtype.FLOAT32 else Payload.BF16
    taken = ("auto", auto, Payload.FP8, Payload.FP8_POW2)
    if config.parallel.device == "cuda" and settings.payload not in taken:
        allowed = f"one of {', '.join(taken)} where parallel.device = cuda and the model is served as {dtype}"
        raise ConfigError("exchange.payload", settings.payload, allowed)
    return ExchangeSpec(
        rank=rank,
        num_ranks=ranks,
        placement=tuple(p // slots for p in range(ranks * slots)) if slots else place_experts(experts, ranks),
        max_tokens=config.step_tokens,
        hidden=spec.hidden,
        top_k=spec.router.top_k,
        payload=auto if settings.payload == "auto" else Payload(settings.payload),
        reduction=Reduction(settings.reduction),
        num_banks=settings.num_banks,
        timeout_ns=int(settings.timeout_seconds * 1e9),
    )


def usable_cores(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors this process may use: by affinity, and by the quota of its control group, rounded up."""
    cores = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # absent, or "max"
            quota, period = map(int, " ".join((control_group / f).read_text() for f in files).split())
            if quota > 0 and period > 0:
                cores = min(cores, -(-quota // period))
    return cores


def spin_budget(spin_us: int, busy: int, cores: int) -> int:
    """Microseconds a rank spins while it waits.

    Args:
        spin_us: as configured; -1 spins only if every thread has its own core.
        busy: ranks x threads of this host.
        cores: usable_cores().
    """
    return spin_us if spin_us >= 0 else SPIN_US * (busy <= cores)


def useful_blocks(scheduler: SchedulerConfig, context: int) -> int:
    """The most blocks that are useful: every running sequence at full length, and as many again for cached
    prefixes."""
    return 2 * scheduler.max_running * -(-context // scheduler.block_size)


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f} GiB"
