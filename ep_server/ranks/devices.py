"""The device of a rank: the CPU, or one GPU. Chooses arithmetic, exchange and runner; uses no channel.

GPU ranks send rows of bfloat16 or FP8 over NVLink to ranks of the same host. To other hosts they send through
host memory or, if configured, from GPU memory. A GPU runs one step ahead of the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ep_server.backends.assembly import RankModel
from ep_server.backends.cpu.native_compute import NativeCompute
from ep_server.backends.cpu.sampler import Sampler
from ep_server.backends.cpu.shared_kv import SharedKv
from ep_server.backends.kv_copies import CpuCopies, NoCopies
from ep_server.backends.kv_rows import CpuRows
from ep_server.backends.masks import Masks
from ep_server.backends.timed_pairs import TimedPairs, live_ranks
from ep_server.backends.torch_compute import TorchCompute
from ep_server.config import Config
from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import Exchange, ExchangeSpec
from ep_server.exchange.factory import needs_cuda_build
from ep_server.models.compute import Compute
from ep_server.models.families import read_spec
from ep_server.models.kv_memory import KvMemoryLayout
from ep_server.models.sizes import context_limit
from ep_server.ranks.exchanges import Opening, open_exchange
from ep_server.ranks.group import (
    gpu_exchange,
    host_blocks,
    local_ranks,
    topology_of,
    useful_blocks,
    weight_bytes,
)
from ep_server.ranks.modes import ALWAYS, NEVER, ExchangeModes, Measurement, TimePair, measure
from ep_server.ranks.overlap import FixedOverlap, MeasuredOverlap, Overlap
from ep_server.ranks.parts import Built, Device, Progress
from ep_server.v1 import rank_pb2 as pb

if TYPE_CHECKING:  # its kernels are for ranks with a GPU
    from ep_server.backends.gpu.moe.rows import RowsOfSteps
    from ep_server.backends.gpu.runner import GpuRunner

log = logging.getLogger(__name__)
OVERLAP_SMS = 48  # of a GPU, for dispatch and combine beside the other micro-batch; not tuned on a model yet


class CpuDevice:
    """Our kernels on `start.threads` threads of the CPU."""

    def __init__(self, start: pb.Start, config: Config) -> None:
        self.ahead, self.warms_alone = 0, False
        self.compute: Compute = NativeCompute(start.threads)
        self._start, self._config = start, config
        self._exchange: Exchange | None = None
        self._known: int | None = None  # see ExchangeModes

    def open(self, spec: ExchangeSpec, opening: Opening) -> Exchange:
        """As Device.open."""
        self._exchange = open_exchange(self._start, self._config, spec, opening)
        return self._exchange

    def build(self, model: RankModel, exchange: Exchange, masks: Masks) -> Built:
        """As Device.build."""
        blocks, size = self._start.kv_blocks, self._config.scheduler.block_size
        layout, shared, make = KvMemoryLayout.of(model.spec, blocks, size, model.kv_dtype), None, None
        try:
            if self._start.HasField("kv_place"):
                shared = SharedKv(layout, self._start.kv_fd, self._start.kv_place)
                make = shared.zeros
            runner = model.runner(exchange, Sampler(model.spec.vocab_size), blocks, size, masks, make)
        except OSError as error:  # also for memory of its own: the limit is that of the process
            raise StartupError(
                f"{layout.nbytes / 2**30:.2f} GiB of KV cache cannot be mapped ({error}): lower "
                "scheduler.kv_blocks or kv_fraction, or raise the limit of the process (ulimit -v)"
            ) from error
        slots = host_blocks(self._config, model.spec)
        copier = CpuCopies(runner.kv_cache, slots) if slots else NoCopies()
        rows = CpuRows(runner.kv_cache)
        exchange_bytes = exchange.capabilities.memory_bytes
        return Built(runner, blocks, exchange_bytes, rows, copier=copier, shared=shared)

    def prepare(self, progress: Progress) -> None:
        """Measures how steps should use the exchange."""
        self._known = normal_from(self._config, self._start, self._own_exchange, self._measurement)

    def modes(self) -> ExchangeModes:
        """As Device.modes. A rank that joined others has not measured."""
        known = self._known
        if known is None:
            known = normal_from(self._config, self._start, self._own_exchange, None)
        return ExchangeModes(known, late=self._measurement)

    @property
    def _own_exchange(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    def _measurement(self) -> Measurement:
        exchange = self._own_exchange
        return measurement_of(exchange, TimedPairs(exchange).run, exchange.spec.max_tokens)

    def overlap(self) -> Overlap:
        """Decides by the times of steps of any size."""
        return overlap_of(self._config, self._start.num_ranks)


class CudaDevice:
    """One GPU. Its number among the visible ones is the local rank."""

    def __init__(self, start: pb.Start, config: Config) -> None:
        self.ahead, self.warms_alone = 1, True
        self._start, self._config = start, config
        self.device = self._own(start.rank - local_ranks(config).start)
        self.compute: Compute = TorchCompute(self.device)
        self._exchange: Exchange | None = None
        self._modes = ExchangeModes()
        self._built: tuple[GpuRunner, str] | None = None  # and the options that decide what its steps need

    def open(self, spec: ExchangeSpec, opening: Opening) -> Exchange:
        """As Device.open."""
        from ep_server.backends.gpu.capability import require_native
        from ep_server.backends.gpu.memory import Room

        if needs_cuda_build(topology_of(self._config, spec), spec):
            require_native("parallel.device = cuda: the exchange over NVLink")
        held = weight_bytes(self._config, read_spec(self._config.model.path), spec, packed=False)
        beside = gpu_exchange(self._config, spec)
        Room.on(self.device).check_weights(held[spec.rank], 0 if beside is None else beside.held)
        self._exchange = open_exchange(self._start, self._config, spec, opening, self.device)
        return self._exchange

    def build(self, model: RankModel, exchange: Exchange, masks: Masks) -> Built:
        """As Device.build. Raises: ConfigError too."""
        from ep_server.backends.gpu.assembly import GpuPlan, decode_kernels, gpu_runner, kv_blocks_on
        from ep_server.backends.gpu.kv_copies import GpuCopies
        from ep_server.backends.gpu.kv_rows import GpuRows
        from ep_server.backends.gpu.memory import room_for_steps

        scheduler, beside = self._config.scheduler, gpu_exchange(self._config, exchange.spec)
        longest = context_limit(model.spec, self._config.model.max_context)
        chosen = decode_kernels(self._config.model.attention, model, scheduler.block_size)
        plan = GpuPlan(
            kv_blocks=scheduler.kv_blocks,
            block_size=scheduler.block_size,
            max_running=scheduler.max_running,
            max_step_tokens=self._config.step_tokens,
            useful_blocks=useful_blocks(scheduler, longest),
            graphs=self._config.parallel.graphs
            and (exchange.capabilities.graph_safe or exchange.spec.local_only),
            overlap=overlap_mode(self._config, exchange.spec.num_ranks),
            timed_every=self._config.metrics.device_phases,
            layer_progress=self._config.handoff.sends,
            step_bytes=0 if exchange.normal is None or beside is None else beside.step,
            copies=chosen.copies,
        )
        blocks = kv_blocks_on(self.device, model, plan)
        of_steps = rows_of(exchange)
        sizes = (
            f"scheduler.kv_blocks = {blocks}, scheduler.max_running = {plan.max_running}, "
            f"scheduler.max_step_tokens = {plan.max_step_tokens}"
        )
        with room_for_steps(self.device, sizes):
            runner = gpu_runner(model, exchange, of_steps, plan, blocks, chosen.kernels, masks)
            slots = host_blocks(self._config, model.spec)
            copier = GpuCopies(runner.kv_cache, slots, self.device) if slots else NoCopies()
            rows = GpuRows(runner.kv_cache, self.device, exchange.spec.timeout_ns / 1e9)
            if self._config.handoff.role != "none":
                rows.warm_up()
        self._built = runner, sizes
        most_singles = min(plan.max_running, plan.max_step_tokens)
        padded = tuple(size for size in runner.graphs.buckets if size > most_singles)
        return Built(runner, blocks, exchange.capabilities.memory_bytes, rows, chosen.named, copier, padded)

    @property
    def runner(self) -> GpuRunner:
        """The runner of build()."""
        assert self._built is not None
        return self._built[0]

    def prepare(self, progress: Progress) -> None:
        """Measures, and captures a graph for each GraphKey. Raises: StartupError if they do not fit."""
        from ep_server.backends.gpu.memory import room_for_steps

        assert self._built is not None
        runner, sizes = self._built
        with room_for_steps(self.device, sizes):
            known = normal_from(self._config, self._start, self._own_exchange, self._measurement)
            self._modes = ExchangeModes(known, undivided=True, late=self._measurement)
            runner.prepare(lambda done, total: progress("graphs", done, total), self._modes.possible)

    @property
    def _own_exchange(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    def _measurement(self) -> Measurement:
        """Of sizes for which all of these GPUs have memory now. Collective."""
        from ep_server.backends.gpu.memory import Room
        from ep_server.backends.gpu.moe.timed_pairs import GpuTimedPairs, pair_bytes

        exchange, most = self._own_exchange, self._own_exchange.spec.max_tokens
        if self.device.type == "cuda":
            most = min(most, max(1, Room.on(self.device).free // pair_bytes(exchange.spec)))
        records = [record for record in exchange.all_gather(most.to_bytes(4, "little")) if record]
        most = min(int.from_bytes(record, "little") for record in records)
        captured = self._config.parallel.graphs and exchange.capabilities.graph_safe
        pairs = GpuTimedPairs(exchange, rows_of(exchange), self.device, most, captured=captured)
        return measurement_of(exchange, pairs.run, most)

    def overlap(self) -> Overlap:
        """Decides by the times of captured steps. Other steps are split only if configured."""
        return overlap_of(self._config, self._start.num_ranks, self.runner.graphs.overlapped)

    def modes(self) -> ExchangeModes:
        """As Device.modes."""
        return self._modes

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
    """The configured device of this rank. Raises: StartupError."""
    return CudaDevice(start, config) if config.parallel.device == "cuda" else CpuDevice(start, config)


def overlap_mode(config: Config, ranks: int) -> str:
    """As configured. A single rank has no wait to hide, so it overlaps only if configured."""
    mode = config.parallel.overlap
    return "off" if mode == "auto" and ranks == 1 else mode


def overlap_of(config: Config, ranks: int, graphs: Iterable[int] | None = None) -> Overlap:
    """The policy of each of so many ranks. graphs: see MeasuredOverlap."""
    mode = overlap_mode(config, ranks)
    return MeasuredOverlap(graphs) if mode == "auto" else FixedOverlap(mode == "on")


def normal_from(
    config: Config, start: pb.Start, exchange: Exchange, begin: Callable[[], Measurement] | None
) -> int:
    """See ExchangeModes.known; as configured or measured. begin: a measurement; None = it cannot.

    Collective. Raises: ConfigError.
    """
    mode, ranks = config.exchange.mode, exchange.spec.num_ranks
    if exchange.normal is None and mode == "normal" and ranks > 1:
        allowed = "auto or low_latency: this exchange has no operations for many rows"
        raise ConfigError("exchange.mode", mode, allowed)
    if exchange.normal is None or mode == "low_latency":
        return NEVER
    if mode == "normal":
        return ALWAYS
    if start.joins or begin is None or len(live_ranks(exchange)) == 1:
        return 0
    return measure(begin())


def measurement_of(exchange: Exchange, time_pair: TimePair, most: int) -> Measurement:
    """Of one rank among those that take part; one of them logs what is found."""
    first = exchange.spec.rank == min(live_ranks(exchange))
    return Measurement(time_pair, exchange.all_gather, most, log.info if first else log.debug)


def rows_of(exchange: Exchange) -> RowsOfSteps:
    """How rows reach a GPU: not at all for a single rank, else as the exchange supports it."""
    from ep_server.backends.gpu.moe.rows import (
        FusedRows,
        LocalRows,
        ManyRows,
        NoRows,
        PlainRows,
        RowsOfSteps,
        SideRows,
    )

    if exchange.spec.local_only:
        local = LocalRows()
        return RowsOfSteps(local, local)
    if (fused := exchange.fused) is not None:
        of_many = NoRows() if exchange.normal is None else ManyRows(exchange.normal)
        return RowsOfSteps(FusedRows(fused), SideRows(fused, OVERLAP_SMS), exchange.check, of_many)
    rows = PlainRows(exchange, exchange.capabilities.cheapest_view)
    if exchange.normal is None:
        return RowsOfSteps(rows, rows, exchange.check)
    many = PlainRows(exchange.normal, exchange.normal.capabilities.cheapest_view)
    return RowsOfSteps(rows, rows, exchange.check, many)
