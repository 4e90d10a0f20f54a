"""A captured decode step is matrix products, kernels of ours and views: nothing small of torch is between."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ep_server.backends.gpu.graphs import GraphKey
from tests.support.gpu.specialised import GQA, MLA, Rank, recorded, still_runner
from tests.support.triton.harness import INTERPRETED

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="operations are looked at where kernels are interpreted"
)
ROWS = 8
PRODUCTS = {"mm", "addmm", "bmm"}
NO_KERNEL = {
    "view", "_unsafe_view", "transpose", "t", "select", "slice", "split_with_sizes", "unsqueeze", "detach",
    "alias", "empty", "empty_like", "new_empty", "unbind",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts operations that a GPU would run a kernel of torch for, but for products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in PRODUCTS | NO_KERNEL:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", [GQA, MLA], ids=("grouped-query", "latent"))
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_small_kernels(config: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    """Without gradients, which inference has not, torch shows what its operations consist of."""
    with recorded(), torch.no_grad():
        runner = still_runner(tmp_path, Rank(config, ranks=ranks, sequences=ROWS, graphs=False))
        with Operations() as found:
            runner._padded(GraphKey(ROWS))
    on_cpu = {"_to_copy", "copy_"}  # logits and the router's rows, which a GPU's products leave as float32
    assert found.seen.keys() <= on_cpu and found.seen["copy_"] == 1
    assert found.seen["_to_copy"] == sum(block is not None for block in runner._decoder._moe)


def test_the_watch_sees_small_kernels() -> None:
    x = torch.ones(2, 3)
    with Operations() as found, torch.no_grad():
        x.t().contiguous().view(6).add_(1)
        torch.bmm(x[None], x.t()[None])
    assert found.seen == {"clone": 1, "add_": 1}
