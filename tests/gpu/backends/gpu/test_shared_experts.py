"""Shared experts on a second branch of a step: every bit as behind the routed ones, whichever comes late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_server.backends.gpu import runner as gpu
from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.moe import moe
from ep_server.backends.gpu.runner import GpuRunner
from tests.support.gpu.steps_of_shared import ROWS, SPARSE, config, logits_of
from tests.support.gpu.watched import made_runner

pytestmark = pytest.mark.gpu
SIZES = config(hidden=2048, ffn=1408, experts=16, latent=512)  # with products as those of DeepSeek-V2-Lite
STEPS = 100  # each with other tokens: what was left by an earlier one is wrong
LATE = 200_000  # clocks of a multiprocessor, some ten times what a layer takes


def made(folder: Path) -> GpuRunner:
    return made_runner(folder, torch.device("cuda"), (GraphKey(ROWS),), SIZES)


def both(runner: GpuRunner) -> list[torch.Tensor]:
    """Logits of captured steps, and of others."""
    return [logits_of(runner, STEPS, bucket) for bucket in (ROWS, 0)]


def of_one_stream(folder: Path, patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    with patch.context() as inside:
        inside.setattr(gpu, "SideStream", lambda device: None)
        return both(made(folder))


def delayed(work: Callable[..., torch.Tensor], streams: list[torch.cuda.Stream], clocks: int) -> Any:
    """Notes the stream that a graph has it on."""

    def call(*given: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            streams.append(torch.cuda.current_stream())
        if clocks:
            torch.cuda._sleep(clocks)
        return work(*given)

    return call


@pytest.mark.parametrize("late", [None, "dense", "grouped"])
def test_a_second_branch_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str | None
) -> None:
    """In captured steps, of which each sparse layer has one on a stream of its own, and in others."""
    # torch deals 32 streams in turn: that of captures, made once in a process, might come up as the second.
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    expected = of_one_stream(tmp_path, monkeypatch)
    assert expected[0].isfinite().all() and len({float(row.sum()) for row in expected[0][:, 0]}) > STEPS // 2
    streams: dict[str, list[torch.cuda.Stream]] = {"dense": [], "grouped": []}
    for name, seen in streams.items():
        monkeypatch.setattr(moe, name, delayed(getattr(moe, name), seen, LATE if name == late else 0))
    runner = made(tmp_path)
    assert len(streams["dense"]) == len(streams["grouped"]) == SPARSE
    assert len(set(streams["dense"])) == len(set(streams["grouped"])) == 1
    assert streams["dense"][0] != streams["grouped"][0]
    assert all(torch.equal(got, wanted) for got, wanted in zip(both(runner), expected, strict=True))
