"""What a rank computes on: the CPU, or one GPU. Chooses arithmetic, exchange and runner; knows no channel.

On a GPU rows of bfloat16 or FP8 travel over NVLink to ranks of the same host; to others through host memory
or, if asked for, from GPU memory. A GPU runs one step ahead of what the host knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ep_server.backends.assembly import RankModel
from ep_server.backends.cpu.native_compute import NativeCompute
from ep_server.backends.cpu.sampler import Sampler
from ep_server.backends.torch_compute import TorchCompute
from ep_server.config import Config
from ep_server.errors import StartupError
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.exchange.factory import needs_cuda_build
from ep_server.models.compute import Compute
from ep_server.models.families import read_spec
from ep_server.models.sizes import context_limit
from ep_server.ranks.exchanges import Opening, open_exchange
from ep_server.ranks.group import local_ranks, topology_of, useful_blocks, weight_bytes
from ep_server.ranks.overlap import BucketOverlap, Overlap, OverlapPolicy
from ep_server.ranks.parts import Built, Device, Progress
from ep_server.v1 import rank_pb2 as pb

if TYPE_CHECKING:  # its kernels are for ranks with a GPU
    from ep_server.backends.gpu.moe.rows import RowsOfSteps

OVERLAP_SMS = 48  # of a GPU, for dispatch and combine beside the other micro-batch; not tuned on a model yet


class CpuDevice:
    """Our kernels on `start.threads` threads of the CPU."""

    def __init__(self, start: pb.Start, config: Config) -> None:
        self.ahead = 0
        self.compute: Compute = NativeCompute(start.threads)
        self._start, self._config = start, config

    def open(self, spec: ExchangeSpec, opening: Opening) -> Exchange:
        """As Device.open."""
        return open_exchange(self._start, self._config, spec, opening)

    def build(self, model: RankModel, exchange: Exchange) -> Built:
        """As Device.build."""
        blocks = self._start.kv_blocks
        runner = model.runner(
            exchange, Sampler(model.spec.vocab_size), blocks, self._config.scheduler.block_size
        )
        return Built(runner, blocks, exchange.capabilities.memory_bytes)

    def prepare(self, runner: Any, progress: Progress) -> None:
        """Nothing: all code is warm."""

    def overlap(self, runner: Any) -> Overlap:
        """By the time that a rank waits."""
        return OverlapPolicy(self._config.parallel.overlap)


class CudaDevice:
    """One GPU: the local rank's number among those that this process sees."""

    def __init__(self, start: pb.Start, config: Config) -> None:
        self.ahead = 1
        self._start, self._config = start, config
        self.device = self._own(start.rank - local_ranks(config).start)
        self.compute: Compute = TorchCompute(self.device)
        self._sizes = ""  # that decide what steps need; once built

    def open(self, spec: ExchangeSpec, opening: Opening) -> Exchange:
        """As Device.open."""
        from ep_server.backends.gpu.capability import require_native
        from ep_server.backends.gpu.memory import Room

        if needs_cuda_build(topology_of(self._config, spec), spec):
            require_native("parallel.device = cuda: the exchange over NVLink")
        held = weight_bytes(self._config, read_spec(self._config.model.path), spec, packed=False)
        Room.on(self.device).check_weights(held[spec.rank])
        return open_exchange(self._start, self._config, spec, opening, self.device)

    def build(self, model: RankModel, exchange: Exchange) -> Built:
        """As Device.build. Raises: ConfigError too."""
        from ep_server.backends.gpu.assembly import GpuPlan, decode_kernels, gpu_runner, kv_blocks_on
        from ep_server.backends.gpu.memory import room_for_steps

        scheduler = self._config.scheduler
        longest = context_limit(model.spec, self._config.model.max_context)
        plan = GpuPlan(
            kv_blocks=scheduler.kv_blocks,
            block_size=scheduler.block_size,
            max_running=scheduler.max_running,
            max_step_tokens=scheduler.max_step_tokens,
            useful_blocks=useful_blocks(scheduler, longest),
            graphs=self._config.parallel.graphs
            and (exchange.capabilities.graph_safe or exchange.spec.local_only),
            overlap=overlap_mode(self._config, exchange.spec.num_ranks),
            timed_every=self._config.metrics.device_phases,
        )
        chosen = decode_kernels(self._config.model.attention, model, scheduler.block_size)
        blocks = kv_blocks_on(self.device, model, plan)
        rows = rows_of(exchange)
        self._sizes = (
            f"scheduler.kv_blocks = {blocks}, scheduler.max_running = {plan.max_running}, "
            f"scheduler.max_step_tokens = {plan.max_step_tokens}"
        )
        with room_for_steps(self.device, self._sizes):
            runner = gpu_runner(model, exchange, rows, plan, blocks, chosen.kernels)
        return Built(runner, blocks, exchange.capabilities.memory_bytes, chosen.named)

    def prepare(self, runner: Any, progress: Progress) -> None:
        """Captures a graph for each form of a step. Raises: StartupError where they do not fit."""
        from ep_server.backends.gpu.memory import room_for_steps

        with room_for_steps(self.device, self._sizes):
            runner.prepare(lambda done, total: progress("graphs", done, total))

    def overlap(self, runner: Any) -> Overlap:
        """By the times of captured steps; other steps are not cut unless that is asked for."""
        mode = overlap_mode(self._config, self._start.num_ranks)
        return BucketOverlap(runner.graphs.overlapped) if mode == "auto" else OverlapPolicy(mode)

    def _own(self, local: int) -> torch.device:
        from ep_server.backends.gpu.capability import gpus_found

        count, reason = gpus_found()
        if local >= count:
            raise StartupError(
                f"parallel.device = cuda: must be cpu, or there must be a GPU for each of parallel.ranks = "
                f"{self._config.parallel.ranks}; this host has {count}{reason}"
            )
        torch.cuda.set_device(local)
        return torch.device("cuda", local)


def device_of(start: pb.Start, config: Config) -> Device:
    """What the configuration says this rank computes on. Raises: StartupError."""
    return CudaDevice(start, config) if config.parallel.device == "cuda" else CpuDevice(start, config)


def overlap_mode(config: Config, ranks: int) -> str:
    """As configured; one rank alone has nothing to hide, so it overlaps only if told to."""
    mode = config.parallel.overlap
    return "off" if mode == "auto" and ranks == 1 else mode


def rows_of(exchange: Exchange) -> RowsOfSteps:
    """How rows come to a GPU: not at all for one rank, else as the exchange is able to bring them."""
    from ep_server.backends.gpu.moe.rows import FusedRows, LocalRows, PlainRows, RowsOfSteps, SideRows

    if exchange.spec.local_only:
        local = LocalRows()
        return RowsOfSteps(local, local)
    if (fused := exchange.fused) is not None:
        return RowsOfSteps(FusedRows(fused), SideRows(fused, OVERLAP_SMS), exchange.check)
    rows = PlainRows(exchange, exchange.capabilities.cheapest_view)
    return RowsOfSteps(rows, rows, exchange.check)
