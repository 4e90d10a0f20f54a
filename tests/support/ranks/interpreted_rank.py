"""A rank process whose GPU is the CPU: the kernels are interpreted, graphs are run again, all else is real.

`python -m tests.support.ranks.interpreted_rank`, as the launcher starts ep_server.ranks.life.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from ep_server.backends.gpu.assembly import GpuPlan, gpu_runner
from ep_server.backends.gpu.moe.rows import RowsOfSteps
from ep_server.backends.kv_rows import CpuRows
from ep_server.backends.torch_compute import TorchCompute
from ep_server.config import Config
from ep_server.exchange.api import ExchangeSpec
from ep_server.ranks import life
from ep_server.ranks.devices import rows_of
from ep_server.ranks.exchanges import Opening, open_exchange
from ep_server.ranks.modes import ALWAYS, NEVER, ExchangeModes
from ep_server.ranks.overlap import FixedOverlap, MeasuredOverlap, Overlap, OverlapRule
from ep_server.ranks.parts import Built
from ep_server.v1 import rank_pb2 as pb
from tests.support.triton.interpreter import make_exact
from tests.support.triton.quick import make_quick


class Interpreted:
    """As ranks.devices.CudaDevice, with the exchange of the CPU. graphs: capture steps."""

    graphs = True

    def __init__(self, start: pb.Start, config: Config) -> None:
        make_exact()
        make_quick()
        self.ahead, self.warms_alone = 1, False
        self.compute = TorchCompute(torch.device("cpu"))
        self._start, self._config = start, config

    def open(self, spec: ExchangeSpec, opening: Opening) -> Any:
        return open_exchange(self._start, self._config, spec, opening)

    def build(self, model: Any, exchange: Any, masks: Any) -> Built:
        scheduler, blocks = self._config.scheduler, self._start.kv_blocks
        mode = self._config.parallel.overlap
        plan = GpuPlan(
            blocks,
            scheduler.block_size,
            scheduler.max_running,
            self._config.step_tokens,
            blocks,
            graphs=self.graphs and self._config.parallel.graphs,
            overlap=mode,
            timed_every=self._config.metrics.device_phases,
            layer_progress=self._config.handoff.sends,
        )
        self.runner = gpu_runner(model, exchange, self.rows(exchange), plan, blocks, masks=masks)
        return Built(self.runner, blocks, 0, CpuRows(self.runner.kv_cache))

    def rows(self, exchange: Any) -> RowsOfSteps:
        return rows_of(exchange)

    def modes(self) -> ExchangeModes:
        """Fixed: nothing is timed here."""
        return ExchangeModes(ALWAYS if self._config.exchange.mode == "normal" else NEVER, undivided=True)

    def prepare(self, progress: Any) -> None:
        self.runner.graphs.record_modes(self.modes().possible)
        self.runner.graphs.capture(lambda done, total: progress("graphs", done, total))

    def overlap(self) -> Overlap:
        mode = self._config.parallel.overlap
        if mode != "auto":
            return FixedOverlap(mode == "on")
        return MeasuredOverlap(self.runner.graphs.overlapped, OverlapRule(window=2, first=2, hold=2))


if __name__ == "__main__":
    sys.exit(life.main(Interpreted))
