"""Recording steps. Graphs are stand-ins that take notes, so no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ep_server.backends.gpu import graphs
from ep_server.backends.gpu.graphs import WARM_UPS, GraphKey, Graphs


def test_each_graph_is_replayed_once_before_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replay copies the graph to the device. It follows the capture, before the next warm-up."""

    notes = list[str]()

    class Graph:
        def pool(self) -> int:
            return 0

        def replay(self) -> None:
            notes.append("replay")

    @contextmanager
    def recording(graph: Graph, pool: int | None) -> Iterator[None]:
        notes.append("capture")
        yield

    def work(key: GraphKey) -> torch.Tensor:
        notes.append(f"run {key.bucket}")
        return torch.empty(0)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(graphs, "await_current", lambda *_: notes.append("wait"))
    Graphs(work, (GraphKey(4), GraphKey(64)), torch.device("cuda"), seconds=1.0).capture()
    one = ["run 64"] * WARM_UPS + ["wait", "capture", "run 64", "replay"]
    assert notes == one + [note.replace("64", "4") for note in one]
