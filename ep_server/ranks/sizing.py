"""The size calculator: how many ranks a model needs, what each holds, and a lower bound for a step's time.

Plans with the server's own `plan_ranks`, for other machines than this one. The bound counts the bytes that a
step must move at the given bandwidths and its multiplications at the given rate, and nothing else. It assumes
uniform routing. Units: bytes, tokens, seconds.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ep_server import _C
from ep_server.config import Config
from ep_server.errors import StartupError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.spec import MAX_RANKS, geometry_of, group_bytes
from ep_server.models.families.spec import GqaSpec, ModelSpec
from ep_server.models.footprint import Footprint, footprint
from ep_server.models.sizes import cache_dtype, kv_block_bytes, serving_dtype
from ep_server.ranks.group import (
    PROCESS_BYTES,
    GroupPlan,
    exchange_spec,
    gpu_exchange,
    host_bytes,
    plan_ranks,
    standby_processes,
)
from ep_server.scheduler.placement import place_experts

# A step of CPU ranks as measured (docs/benchmarks.md): so much for a layer beside its kernels, and then the
# bound to twice the bound.
CPU_LAYER_SECONDS = 0.25e-3
CPU_OF_BOUND = (1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of one rank. bandwidth, link: bytes per second, of memory and to other ranks, one way.

    memory: of one rank, bytes. flops: per second, multiply and add counted as two; 0 = not bounded.
    packed: weights as CPU ranks keep them.
    """

    memory: int
    bandwidth: float
    link: float
    flops: float = 0.0
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """One decode step: tokens per rank, and the tokens each sequence has in its KV cache.

    ranks: size() sets it.
    """

    tokens: int
    context: int
    ranks: int = 1

    @property
    def drawn(self) -> int:
        """Tokens of all ranks."""
        return self.tokens * self.ranks


@dataclass(frozen=True, slots=True)
class Bound:
    """One lower bound of a step. amount: bytes, or operations for the arithmetic."""

    name: str
    amount: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """The fullest rank: rank 0. parts: name -> bytes. kv_tokens: of one rank. bounds: of its step.

    overhead: of a step in addition to its bounds, seconds; None if no such machine was measured.
    """

    ranks: int
    plan: GroupPlan
    parts: dict[str, int]
    kv_bytes_per_token: int
    kv_tokens: int
    bounds: tuple[Bound, ...]
    overhead: float | None

    @property
    def used(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def step_seconds(self) -> float:
        """Bound of a step: memory and arithmetic at once, the exchange after them."""
        *memory, exchange, arithmetic = (bound.seconds for bound in self.bounds)
        return max(sum(memory), arithmetic) + exchange

    @property
    def expected_seconds(self) -> tuple[float, float] | None:
        """The probable range of a step's time, or None if that was never measured."""
        if self.overhead is None:
            return None
        low, high = (self.overhead + factor * self.step_seconds for factor in CPU_OF_BOUND)
        return low, high


def size(config: Config, spec: ModelSpec, machine: Machine, workload: Workload) -> Sizing:
    """A plan of config.parallel.ranks ranks. Raises: ConfigError; StartupError if it does not fit."""
    ranks, dtype = config.parallel.ranks, serving_dtype(spec, config.model.dtype)
    weights = footprint(spec, dtype, packed=machine.packed)
    held = weights.rank_bytes(exchange_spec(config, spec, 0).placement, ranks)
    # All ranks get as many KV blocks as the fullest one has room for.
    # Processes on standby belong to no rank.
    beside = standby_processes(config) * PROCESS_BYTES
    available = ranks * (machine.memory - max(held)) + sum(held) + beside
    plan = plan_ranks(config, spec, available, packed=machine.packed)
    owners = place_experts(spec.router.num_experts, ranks)
    owned, workload = owners.count(0), dataclasses.replace(workload, ranks=ranks)
    cached = cache_dtype(dtype, config.model.kv_dtype)
    block = kv_block_bytes(spec, config.scheduler.block_size, cached)
    parts = {
        **weights.replicated,
        f"experts ({owned} of {spec.router.num_experts} per layer)": owned
        * weights.expert
        * weights.sparse_layers,
        **(
            {f"spare expert slots ({spare} per layer)": spare * plan.spares.slot_bytes}
            if (spare := plan.exchange.placement.count(0) - owned)
            else {}
        ),
        "KV cache": plan.kv_blocks * block,
        **(
            {"host tier": host_bytes(config, spec)} if machine.packed and config.scheduler.kv_host_gib else {}
        ),
        **(
            {"host shadow": plan.shadow.nbytes // ranks} if machine.packed and plan.shadow is not None else {}
        ),
        **_exchange_parts(config, plan.exchange, packed=machine.packed),
        "process": PROCESS_BYTES,
    }
    per_token = kv_block_bytes(spec, 1, cached)
    bounds = (
        *_memory_bounds(spec, owners, weights, workload, per_token, machine.bandwidth),
        _exchange_bound(spec, plan.exchange, owners, workload, machine.link),
        _arithmetic_bound(spec, weights, workload, dtype.itemsize, machine.flops),
    )
    tokens = plan.kv_blocks * config.scheduler.block_size
    overhead = spec.num_layers * CPU_LAYER_SECONDS if machine.packed else None
    return Sizing(ranks, plan, parts, per_token, tokens, bounds, overhead)


def _exchange_parts(config: Config, exchange: ExchangeSpec, *, packed: bool) -> dict[str, int]:
    """Of one rank. On a GPU the heap for many rows is a part of its own."""
    on_gpu = None if packed else gpu_exchange(config, exchange)
    if on_gpu is None:
        return {"exchange": group_bytes(exchange) // exchange.num_ranks}
    return {"exchange": on_gpu.slots, **({"exchange of many rows": on_gpu.heap} if on_gpu.heap else {})}


def fewest_ranks(config: Config, spec: ModelSpec, machine: Machine, workload: Workload) -> Sizing:
    """The plan with the fewest ranks that hold the model. Raises: StartupError if 64 do not; ConfigError."""
    for ranks in range(1, MAX_RANKS + 1):
        parallel = dataclasses.replace(config.parallel, ranks=ranks)
        try:
            return size(dataclasses.replace(config, parallel=parallel), spec, machine, workload)
        except StartupError as error:
            refused = error
    raise refused


def distinct_experts(experts: int, top_k: int, tokens: float) -> float:
    """Mean number of distinct experts of a layer if each token draws K of E, each set equally likely."""
    missed: float = (1 - top_k / experts) ** tokens
    return experts * (1 - missed)


def _memory_bounds(
    spec: ModelSpec,
    owners: tuple[int, ...],
    weights: Footprint,
    load: Workload,
    kv_per_token: int,
    rate: float,
) -> tuple[Bound, ...]:
    """Weights and KV cache that one rank reads in a step. owners: [E] rank of each expert."""
    fixed = sum(number for part, number in weights.replicated.items() if part != "embedding")
    router = spec.router
    reached = distinct_experts(router.num_experts, router.top_k, load.drawn) / router.num_experts
    experts = reached * owners.count(0) * weights.expert * weights.sparse_layers
    window = spec.attention.window if isinstance(spec.attention, GqaSpec) else 0
    kv = load.tokens * min(load.context, window or load.context) * kv_per_token
    named = (("replicated weights", fixed), (f"experts ({reached:.0%} reached)", experts), ("KV cache", kv))
    return tuple(Bound(name, number, number / rate) for name, number in named)


def _exchange_bound(
    spec: ModelSpec, exchange: ExchangeSpec, owners: tuple[int, ...], load: Workload, rate: float
) -> Bound:
    """Rows that one rank sends and receives back."""
    layout = _C.Layout(geometry_of(exchange))
    experts, k = spec.router.num_experts, spec.router.top_k
    remote = 0.0  # remote ranks that receive a token of rank 0
    for rank in range(1, load.ranks):
        owned = owners.count(rank)
        remote += 1 - math.comb(experts - owned, k) / math.comb(experts, k)
    row = layout.row_bytes + layout.scale_bytes + layout.choices_per_token * layout.combine_bytes
    number = sum(spec.sparse_layers) * load.tokens * remote * row
    return Bound(f"dispatch and combine ({remote:.2f} rows a token)", number, number / rate)


def _arithmetic_bound(
    spec: ModelSpec, weights: Footprint, load: Workload, itemsize: int, rate: float
) -> Bound:
    """Multiplications with the weights of a step. Leaves out attention over the context."""
    fixed = sum(number for part, number in weights.replicated.items() if part != "embedding")
    expert = 3 * spec.expert_ffn * spec.hidden
    active = fixed / itemsize + spec.router.top_k * expert * weights.sparse_layers
    number = 2.0 * active * load.tokens
    return Bound("arithmetic", number, number / rate if rate else 0.0)
