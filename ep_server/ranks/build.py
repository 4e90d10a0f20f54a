"""Builds the parts of one rank in its own process: exchange, weights, KV cache, scheduler; and warms them up.

Defines the parts and their order, but uses no channel. Collective: every rank of the group does the same.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ep_server.backends.assembly import LoadParams, RankModel, load_model
from ep_server.backends.cpu.native_compute import NativeCompute
from ep_server.backends.kv_copies import KvCopier, NoCopies
from ep_server.backends.shadow import HostExperts, copies_for
from ep_server.backends.slot_loader import SlotLoader
from ep_server.config import Config
from ep_server.errors import StartupError, Unavailable
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.models.families import ModelSpec, read_spec
from ep_server.models.shadow import ShadowLayout
from ep_server.models.sizes import serving_dtype
from ep_server.ranks.background import run_behind
from ep_server.ranks.changes import Change
from ep_server.ranks.devices import device_of
from ep_server.ranks.exchanges import Opening
from ep_server.ranks.experts import RankExperts
from ep_server.ranks.group import exchange_spec
from ep_server.ranks.handoff.desk import HandoffDesk
from ep_server.ranks.lost_kv import LostKv
from ep_server.ranks.messages import placement_of
from ep_server.ranks.modes import ExchangeModes
from ep_server.ranks.new_weights import WeightsInPlace
from ep_server.ranks.overlap import Overlap
from ep_server.ranks.parts import AnyRunner, Built, Device, Progress
from ep_server.ranks.profiler import StepProfiler
from ep_server.ranks.protocol import pid_space
from ep_server.ranks.shadow_filler import ShadowFiller
from ep_server.records import RankReady, Request, Sampling, SeqSlice, StepBatch, Stopping
from ep_server.scheduler.batch import AUTO_BUDGET, IDLE, SchedulerLimits
from ep_server.scheduler.placement import Placement
from ep_server.scheduler.rank_scheduler import RankScheduler
from ep_server.text.grammars.masks import GrammarMasks
from ep_server.text.tokenizer import Tokenizer
from ep_server.v1 import rank_pb2 as pb

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
MOST_MASK_THREADS = 8
WARM_UP_NUMBER = 0  # the front numbers its requests from 1


@dataclass(frozen=True, slots=True)
class RankParts:
    """A rank that is ready to step. copier: of the host tier. new_weights, experts: see OrderDesk.

    handoff: with ranks of other servers. filler: of the host shadow; runs until close().
    lost_kv: KV blocks of lost ranks.
    """

    exchange: Exchange
    runner: AnyRunner
    scheduler: RankScheduler
    ready: RankReady
    overlap: Overlap
    modes: ExchangeModes
    masks: GrammarMasks
    profiler: StepProfiler
    new_weights: Callable[[str, int, str], Change]
    handoff: HandoffDesk
    lost_kv: LostKv
    copier: KvCopier = field(default_factory=NoCopies)
    experts: RankExperts | None = None
    filler: ShadowFiller | None = None


def build_rank(
    start: pb.Start,
    progress: Progress,
    opening: Opening,
    choose: Callable[[pb.Start, Config], Device] = device_of,
) -> RankParts:
    """Loads what this rank owns and runs the first steps with the others.

    Args:
        opening: gets the exchange as soon as the other ranks can see this one.
        choose: picks the device of this rank.
    Raises: StartupError and its children; ExchangeError if a peer fails.
    """
    began = time.monotonic()
    # The kernels have their own threads. torch's threads would compete with them between small operations.
    torch.set_num_threads(1)
    config = Config.from_values(json.loads(start.config_json))
    model_spec = read_spec(config.model.path)
    spec = exchange_spec(config, model_spec, start.rank)
    device = choose(start, config)
    # Before the weights: its heartbeat shows that this rank is alive, however long loading takes.
    exchange = device.open(spec, opening)
    placement = placement_of(start.placement) if start.HasField("placement") else None
    params = _load_params(start, config, spec, device, placement)
    shadow = _shadow(start, config, model_spec, device)
    with ThreadPoolExecutor(1, "vocabulary") as beside:
        masks_made = beside.submit(_masks, config, model_spec, start.threads)
        model = _load(start, device, partial(load_model, params, progress, shadow))
        masks = masks_made.result()
    loader = SlotLoader(model, shadow)
    loader.warm_up(params)  # takes its memory before the KV cache does
    built = device.build(model, exchange, masks)
    experts = None if placement is None else _experts(start, placement, params, built.runner, loader)
    filler = None if shadow is None else ShadowFiller(shadow, model, params, experts)
    copies = not start.joins  # else others may be writing new weights into the shadow, until it takes part
    if filler is not None and copies and _on_cpu(device):
        _fill(filler, progress)
    limits = _limits(config, model, built, device.ahead)
    if device.warms_alone or not start.joins:
        both = config.parallel.overlap != "off"
        _first_steps(device, exchange, built.runner, limits, progress, (1, 2) if both else (1,))
    if filler is not None:
        filler.start(copies=copies)
    scheduler = RankScheduler(limits, start.weights_version)
    handoff = HandoffDesk.open(config, built.rows, start.rank, scheduler.handoffs)
    seconds = time.monotonic() - began
    return RankParts(
        exchange=exchange,
        runner=built.runner,
        scheduler=scheduler,
        ready=_ready(start.rank, config, model, built, handoff.address, seconds),
        overlap=device.overlap(),
        modes=device.modes(),
        masks=masks,
        profiler=StepProfiler(
            config.profile.directory, start.rank, on_device=config.parallel.device == "cuda"
        ),
        new_weights=WeightsInPlace(model, params, scheduler, built.runner, experts, shadow, filler).change,
        handoff=handoff,
        lost_kv=LostKv(scheduler.lost, built.shared, limits.block_size),
        copier=built.copier,
        experts=experts,
        filler=filler,
    )


def _on_cpu(device: Device) -> bool:
    return device.compute.device.type == "cpu"


def _load(start: pb.Start, device: Device, load: Callable[[], RankModel]) -> RankModel:
    """Behind the ranks that serve, where these use the same cores and do not wait for this one."""
    behind = start.joins and not start.awaited and _on_cpu(device)
    return run_behind(load) if behind else load()


def _experts(
    start: pb.Start, placement: Placement, params: LoadParams, runner: AnyRunner, loader: SlotLoader
) -> RankExperts:
    """Those that can move; a rank that joins takes part in none yet."""
    experts = RankExperts(params, runner, loader)
    experts.use(placement, frozenset(start.live))
    experts.waits = start.joins
    return experts


def _first_steps(
    device: Device,
    exchange: Exchange,
    runner: AnyRunner,
    limits: SchedulerLimits,
    progress: Progress,
    micro_batches: tuple[int, ...],
) -> None:
    """With the others, except of a rank that joins, which masks them."""
    progress("warm-up", 0, 1)
    exchange.barrier()
    with torch.inference_mode():
        warm_up(runner, limits, micro_batches)
        device.prepare(progress)
    progress("warm-up", 1, 1)
    exchange.barrier()  # votes have a deadline, which must not begin while another rank compiles


def _ready(
    rank: int, config: Config, model: RankModel, built: Built, handoff: tuple[str, str], seconds: float
) -> RankReady:
    """What a rank reports once it can step. handoff: as HandoffDesk.address. seconds: of the start."""
    size = config.scheduler.block_size
    return RankReady(
        rank=rank,
        pid=os.getpid(),
        kv_blocks=built.kv_blocks,
        block_size=size,
        weight_bytes=model.weights.nbytes,
        kv_bytes=built.kv_blocks * model.kv_block_bytes(size),
        exchange_bytes=built.exchange_bytes,
        load_seconds=seconds,
        attention=built.attention,
        kv_host_bytes=built.copier.slots * model.kv_block_bytes(size),
        kv_address=handoff[0],
        kv_local=handoff[1],
        pid_space=pid_space(),
        gpus=torch.cuda.device_count() if config.parallel.device == "cuda" else 0,
    )


def _shadow(start: pb.Start, config: Config, spec: ModelSpec, device: Device) -> HostExperts | None:
    """The host shadow as this rank maps it, if there is one."""
    if not start.HasField("shadow_fd"):
        return None
    packed = isinstance(device.compute, NativeCompute)
    layout = ShadowLayout.of(spec, serving_dtype(spec, config.model.dtype), packed=packed)
    return HostExperts(layout, copies_for(device.compute.device), start.shadow_fd)


def _fill(filler: ShadowFiller, progress: Progress) -> None:
    """Fills the host shadow before the rank serves. Raises: StartupError."""
    try:
        filler.fill(partial(progress, "shadow"))
    except Unavailable as error:
        raise StartupError(f"resilience.shadow: {error}; off does without") from error


def _masks(config: Config, spec: ModelSpec, threads: int) -> GrammarMasks:
    """Of the requests with a grammar. Raises: CheckpointError."""
    tokenizer = Tokenizer.load(Path(config.model.path))
    eos = [token for token in spec.eos_token_ids if token < spec.vocab_size]
    inner = None if tokenizer is None else tokenizer.inner
    return GrammarMasks(inner, spec.vocab_size, eos, min(threads, MOST_MASK_THREADS))


def _load_params(
    start: pb.Start, config: Config, spec: ExchangeSpec, device: Device, placement: Placement | None
) -> LoadParams:
    given = config.model
    return LoadParams(
        given.path,
        start.rank,
        spec.placement,
        given.dtype,
        given.max_context,
        start.threads,
        device.compute,
        held=None if placement is None else placement.of_rank(start.rank),
        load_format=given.load_format,
        routing=given.routing,
        seed=given.seed,
        kv_dtype=given.kv_dtype,
        version=start.weights_version,
        files=start.weights_files,
    )


def _limits(config: Config, model: RankModel, built: Built, ahead: int) -> SchedulerLimits:
    budget = config.scheduler.itl_budget_ms
    return SchedulerLimits(
        max_running=config.scheduler.max_running,
        max_step_tokens=config.step_tokens,
        block_size=config.scheduler.block_size,
        kv_blocks=built.kv_blocks,
        # Experts drawn at random differ between requests, so keys and values of equal prefixes differ too.
        prefix_cache=config.scheduler.prefix_cache and config.model.routing == "router",
        max_context=model.max_context,
        ahead=ahead,
        host_blocks=built.copier.slots,
        itl_budget_ns=AUTO_BUDGET if budget < 0 else int(budget * 1e6),
        step_sizes=built.step_sizes,
    )


def warm_up(runner: AnyRunner, limits: SchedulerLimits, micro_batches: tuple[int, ...]) -> None:
    """Runs a prefill, a decode and an idle step of each kind, so that the first request finds all code warm.

    It writes into the first KV blocks, which are not in use yet.
    """
    size = min(
        WARM_UP_TOKENS, limits.max_step_tokens, limits.max_context, limits.kv_blocks * limits.block_size
    )
    request = Request("warm-up", WARM_UP_NUMBER, (0,) * size, Sampling(temperature=0.0), Stopping(2))
    blocks = tuple(range(-(-size // limits.block_size)))
    prefill = SeqSlice(request.number, 0, request.prompt_ids, blocks, True)
    decode = SeqSlice(request.number, size - 1, (0,), blocks, True)
    for count in micro_batches:
        runner.add(request)
        runner.run(StepBatch((prefill,), size), count)
        runner.run(StepBatch((decode,), 1), count)
        runner.run(IDLE, count)
        runner.remove(request.number)
