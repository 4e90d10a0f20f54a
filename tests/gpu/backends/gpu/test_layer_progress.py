"""The host sees which layers a step has written while the GPU runs it, from a graph too."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from ep_server.backends.gpu.layer_progress import DeviceProgress

pytestmark = pytest.mark.gpu
LAYERS, CYCLES = 3, 100_000_000  # about 50 ms of each layer


@pytest.mark.parametrize("captured", [False, True])
def test_layers_are_seen_while_a_step_runs(captured: bool) -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(device), torch.inference_mode():
        progress, rows = DeviceProgress(device, LAYERS), torch.zeros(LAYERS, dtype=torch.int64, device=device)
        beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def layers() -> None:
            for layer in range(LAYERS):
                torch.cuda._sleep(CYCLES)
                rows[layer] += 1
                progress.written(layer)

        launch: Callable[[], None] = layers
        layers()  # compiles
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                layers()
            launch = graph.replay
        for run in (2, 3):
            step = progress.plan_step()
            progress.begin()
            launch()
            following, seen = progress.plan_step(), dict[int, list[int]]()
            end = time.monotonic() + 30
            while LAYERS not in seen:
                assert time.monotonic() < end
                count = progress.layers_of(step)
                if count not in seen:
                    with torch.cuda.stream(beside):  # what another stream reads then is there
                        seen[count] = rows[:count].tolist()
            assert set(seen) >= {1, 2, 3} and progress.layers_of(following) == 0
            assert all(found == [run] * count for count, found in seen.items())
