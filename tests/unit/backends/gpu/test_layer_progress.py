"""The layers that a step has written, as the host sees them while the device runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.layer_progress import DeviceProgress
from ep_server.records import SeqSlice, StepBatch
from tests.support.gpu.runners import gpu_runner
from tests.support.models.checkpoints import Tiny
from tests.support.ranks.rank_group import greedy
from tests.support.triton.harness import DEVICE

LAYERS = 3


def layers_of(progress: DeviceProgress, *steps: int) -> list[int]:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return [progress.layers_of(step) for step in steps]


def test_layers_of_steps_in_flight() -> None:
    """The host plans a step while the device runs the one before; warm-ups do not count."""
    progress = DeviceProgress(DEVICE, LAYERS)
    for layer in range(10 * LAYERS):  # warm-up
        progress.written(layer)
    layers_of(progress)
    first = progress.plan_step()
    assert layers_of(progress, first) == [0]
    progress.begin()
    progress.written(0)
    progress.written(1)
    second = progress.plan_step()
    assert layers_of(progress, first, second) == [2, 0]
    progress.written(2)
    assert layers_of(progress, first, second) == [3, 0]
    third = progress.plan_step()  # the second was not launched, or does not count
    progress.begin()
    assert layers_of(progress, first, second, third) == [3, 0, 0]
    progress.written(0)
    assert layers_of(progress, first, second, third) == [3, 3, 1]


@pytest.mark.skipif(find_spec("transformers") is None, reason="makes the checkpoint")
def test_steps_of_prompts_count(tiny: Callable[[str], Tiny]) -> None:
    """In a graph or without one; not those of single tokens, nor those of two micro-batches."""
    model = tiny("qwen3_moe")
    keys = (GraphKey(4), GraphKey(24))
    progress = DeviceProgress(DEVICE, 2)
    runner = gpu_runner(model.path, keys, progress=progress)
    assert len(runner.kv_cache.layers) == 2
    with torch.inference_mode():
        runner.graphs.capture()
        runner.add(greedy(1, model.prompts[0], 8))

        def run(start: int, count: int, bucket: int, micro_batches: int = 1) -> int:
            step = progress.plan_step()
            ids = tuple(range(1, count + 1))
            piece = SeqSlice(1, start, ids, tuple(range(16)), sample=True)
            runner.collect(runner.launch(StepBatch((piece,), count), micro_batches, bucket))
            return layers_of(progress, step)[0]

        steps = [run(0, 5, 0), run(5, 20, 24), run(25, 1, 4), run(26, 6, 0, 2), run(32, 5, 0)]
        assert steps == [2, 2, 0, 0, 2]
