"""What makes launchers fit for CUDA graphs: they allocate nothing and ask the device nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from ep_server.backends.gpu.kernels.triton.paged import AttentionRule
from ep_server.backends.gpu.kernels.triton.paged_prefill import prefill
from tests.support.triton import meta_tensors, shapes

# Operations of a tensor's description only.
VIEWS = {
    "aten.select.int",
    "aten.slice.Tensor",
    "aten.view.default",
    "aten.view.dtype",
    "aten.transpose.int",
    "aten.detach.default",
}


class Watch(TorchDispatchMode):
    """Notes every operation that touches memory, but those of building a test's input."""

    def __init__(self) -> None:
        super().__init__()
        self.building = False
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.building and str(func) not in VIEWS:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("part", shapes.PARTS, ids=lambda part: part.__name__)
def test_launchers_only_launch(part: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors, which have no values to ask for; the launches themselves are counted instead."""
    launched = []
    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "run", lambda kernel, *args, **kwargs: launched.append(kwargs["grid"]))
    watch, build = Watch(), meta_tensors.meta

    def meta(*shape: int, **options: Any) -> torch.Tensor:
        watch.building = True
        try:
            return build(*shape, **options)
        finally:
            watch.building = False

    for module in (shapes, meta_tensors):
        monkeypatch.setattr(module, "meta", meta)
    with watch:
        part()
    assert watch.seen == []
    assert launched and all(isinstance(n, int) and n > 0 for grid in launched for n in grid)


def test_prefill_is_compiled_once_for_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks come in any number, and compiling for one takes a second: no constant may depend on it."""
    constants = []
    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(
            kind, "run", lambda kernel, *args, **kwargs: constants.append({**kwargs, "grid": None})
        )
    for count, tokens in ((1, 7), (5, 40), (64, 64)):
        q = meta_tensors.meta(tokens, 32, 128)
        starts, cache = (
            meta_tensors.meta(count + 1, dtype=torch.int32),
            meta_tensors.gqa_cache(torch.bfloat16),
        )
        prefill(q, starts, cache, meta_tensors.sequences(count), AttentionRule(0.1), q)
    assert len(constants) == 3 and constants[0] == constants[1] == constants[2]


def test_the_watch_sees_what_it_must() -> None:
    x = torch.ones(2)
    watch = Watch()
    with watch:
        x[0].item()
        torch.empty(2)
    assert watch.seen == ["aten._local_scalar_dense.default", "aten.empty.memory_format"]
