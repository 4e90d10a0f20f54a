"""Whole steps of ranks on a CPU: kernels of Triton interpreted, those of the exchange over NVLink emulated.

Imported by a rank before its kernels are: what looks for a GPU is imported behind emulated.install().
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.exchange import emulated

PIECES = ((0, 3), (3, 4))  # a prompt, then a token
SUMMED, NORMED = "summed", "normed"
PROMPTS = ((3, 14, 15, 92), (27, 18, 28, 18))


@dataclass(frozen=True)
class Found:
    """What a rank's sequence gave. logits: [pieces, V].

    notes: in their order, combines, NORMED or SUMMED, and the phases that ended.
    """

    logits: torch.Tensor
    notes: list[str]


def run_steps(group: dist.ProcessGroup, path: Path, config: dict[str, Any], folder: Path) -> list[Found]:
    """This rank's sequence of PROMPTS in PIECES, with combines that norm, with others, and as many rows.

    Args:
        path: of the emulation. config: of a model, whose weights are random. folder: of this call alone.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton at its import
    emulated.install(path)
    mine = folder / str(group.rank())
    mine.mkdir()
    (mine / "config.json").write_text(json.dumps(config))
    with emulated.OnCpu(), torch.inference_mode():
        return _run(group, mine, config.get("num_experts") or config["n_routed_experts"])


def _run(group: dist.ProcessGroup, folder: Path, experts: int) -> list[Found]:
    from ep_server.backends.assembly import LoadParams, load_model
    from ep_server.backends.torch_compute import TorchCompute
    from tests.support.exchange.gpu_group import close_exchange, open_exchange
    from tests.support.models.driver import exchange_spec

    rank, placement = group.rank(), tuple(e % group.size() for e in range(experts))
    compute = TorchCompute(torch.device("cpu"))
    model = load_model(
        LoadParams(str(folder), rank, placement, "bfloat16", compute=compute, load_format="dummy")
    )
    spec = exchange_spec(model, rank, group.size(), placement, 8)
    exchange = Noting(open_exchange(group, spec, many=True))
    found = [_steps(model, exchange, PROMPTS[rank % 2], alone) for alone in (True, False, None)]
    _time(exchange.inner)
    close_exchange(exchange.inner)
    return found


def _time(exchange: Any) -> None:
    """Both ways are timed as before a capture."""
    from ep_server.backends.gpu.moe.rows import FusedRows, ManyRows, RowsOfSteps
    from ep_server.backends.gpu.moe.timed_pairs import GpuTimedPairs

    few = FusedRows(exchange)
    rows = RowsOfSteps(few, few, exchange.check, ManyRows(exchange.normal))
    timed = GpuTimedPairs(exchange, rows, torch.device("cpu"), exchange.spec.max_tokens, captured=False)
    assert all(timed.run(normal, size) > 0 for size in (1, 8) for normal in (False, True))


def _steps(model: Any, exchange: Noting, ids: tuple[int, ...], alone: bool | None) -> Found:
    """alone: see FusedRows; None = ManyRows."""
    from ep_server.backends.gpu import runner as steps
    from ep_server.backends.gpu.assembly import GpuPlan, gpu_runner
    from ep_server.backends.gpu.moe.rows import FusedRows, ManyRows, RowsOfSteps
    from ep_server.backends.gpu.side_stream import SideStream
    from tests.support.gpu.whole_steps import logits_of
    from tests.support.models.driver import BLOCK, BLOCKS

    exchange.notes = []
    steps.no_lap = lambda phase: exchange.notes.append(phase.name)
    rows: Any = ManyRows(exchange.normal) if alone is None else FusedRows(exchange, alone=alone)
    plan = GpuPlan(BLOCKS, BLOCK, max_running=4, max_step_tokens=8, useful_blocks=BLOCKS, graphs=False)
    runner = gpu_runner(model, exchange.inner, RowsOfSteps(rows, rows), plan, BLOCKS)
    runner._side = SideStream(model.compute.device) if alone else None
    return Found(logits_of(runner, ids, PIECES), exchange.notes)


class Noting:
    """An exchange that notes what its combines do."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.notes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def combine(self, *given: Any, add_norm: Any = None, **more: Any) -> torch.Tensor:
        """As the inner one's."""
        self.notes.append(SUMMED if add_norm is None else NORMED)
        combined: torch.Tensor = self.inner.combine(*given, add_norm=add_norm, **more)
        return combined
