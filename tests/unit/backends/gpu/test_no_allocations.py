"""A captured step whose requests are those of the last one allocates nothing on the device.

On a GPU its allocator tells. On the CPU it is every operation of torch that leaves a tensor in memory of its
own, but for interpreted kernels and for what a graph would replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from ep_server.backends.gpu.graphs import GraphKey
from ep_server.backends.gpu.runner import GpuRunner
from ep_server.records import SeqSlice, StepBatch
from tests.support.gpu.watched import made_runner, request
from tests.support.models.driver import BLOCK
from tests.support.triton.harness import DEVICE, INTERPRETED

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1, "top_p": 0.7},
    {"temperature": 0.0, "presence_penalty": 0.5},
)
FORM, PROMPT = GraphKey(4), request(0, temperature=0.0).prompt_ids


class Allocations(TorchDispatchMode):
    """Names of operations with a result that lies in none of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.found = True, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        made = [x for x in tree_leaves(result) if torch.is_tensor(x) and x.numel()]
        if self.on and any(x.untyped_storage().data_ptr() not in given for x in made):
            self.found.append(str(func))
        return result


@contextmanager
def interpreted_watch() -> Iterator[list[str]]:
    run, watch = InterpretedFunction.run, Allocations()

    def trusted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        watch.on = False
        try:
            return run(kernel, *args, **kwargs)
        finally:
            watch.on = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", trusted)
        with watch:
            yield watch.found


@contextmanager
def gpu_watch() -> Iterator[list[str]]:
    found: list[str] = []
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    yield found
    made = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] - before
    found += ["an allocation"] * made


watch: Callable[[], Any] = interpreted_watch if INTERPRETED else gpu_watch


def step(start: int, tokens: tuple[int, ...], sequences: int) -> StepBatch:
    """So many tokens of each sequence, from one place on."""
    held = [tuple(range(4 * n, 4 * n + -(-(start + len(tokens)) // BLOCK))) for n in range(sequences)]
    pieces = [SeqSlice(n + 1, start, tokens, blocks, True) for n, blocks in enumerate(held)]
    return StepBatch(tuple(pieces), len(tokens) * sequences)


def prepared(folder: Path) -> tuple[GpuRunner, int]:
    """A runner whose requests have run their prompts and a captured step, and where the next step begins."""
    runner = made_runner(folder, DEVICE, (FORM,))
    for number, settings in enumerate(KINDS, start=1):
        runner.add(request(number, **settings))
    with torch.inference_mode():
        runner.run(step(0, PROMPT, len(KINDS)))
        runner.collect(runner.launch(step(len(PROMPT), (9,), len(KINDS)), 1, FORM.bucket))
    return runner, len(PROMPT) + 1


def test_a_captured_step_allocates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one is in another KV block."""
    runner, first = prepared(tmp_path)
    left = runner.graphs.replay(FORM)
    if INTERPRETED:
        monkeypatch.setattr(runner.graphs, "replay", lambda key: left)
    for start in range(first, first + 3):
        batch = step(start, (start,), len(KINDS))
        with torch.inference_mode(), watch() as found:
            launched = runner.launch(batch, 1, FORM.bucket)
        assert found == []
        runner.collect(launched)


def test_the_watch_sees_an_allocation() -> None:
    x = torch.ones(4, device=DEVICE)
    with watch() as found:
        x[1:].add_(x[0])
    assert found == []
    with watch() as found:
        y = x + 1
    assert len(found) == 1 and len(y) == 4
