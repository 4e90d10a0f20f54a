"""What work on a second stream waits for, what waits for it, and that a step with it computes the same.

Streams are stand-ins that note what is asked of them.
"""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

from ep_server.backends.gpu.moe import moe
from ep_server.backends.gpu.moe.rows import LocalRows
from ep_server.backends.gpu.side_stream import SideStream
from tests.support.gpu.noted_streams import note_streams
from tests.support.gpu.steps_of_shared import ROWS, SPARSE, config, logits_of, step
from tests.support.gpu.watched import made_runner
from tests.support.ranks.rank_group import greedy
from tests.support.triton.harness import DEVICE, INTERPRETED

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
NOTES: list[str] = []


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> SideStream:
    note_streams(monkeypatch, NOTES)
    return SideStream(torch.device("cpu"))


def noted(what: str) -> str:
    NOTES.append(what)
    return what


def test_side_work_waits_for_the_fork_and_the_hook_for_the_work(beside: SideStream) -> None:
    fork = beside.fork()
    NOTES.append("meanwhile")
    hook = fork.run(partial(noted, "work"))
    begun = ["main records", "meanwhile", "side waits for event 1", "on side", "work", "on main"]
    assert [*begun, "side records"] == NOTES
    assert hook() == "work" and NOTES[-1] == "main waits for event 7"


def test_what_the_work_reads_lives_until_its_hook_is_gone(beside: SideStream) -> None:
    x = torch.ones(2, 3)
    held = weakref.ref(x)
    hook = beside.fork().run(partial(torch.add, x, 1))
    del x
    hook()
    assert held() is not None
    del hook
    assert held() is None


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU streams are real: tests/gpu has the test")
def test_a_step_with_shared_experts_beside(
    tmp_path: Path, beside: SideStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bit as without; in each sparse layer they are enqueued behind its dispatch, before its experts.

    Two micro-batches do without, and more rows than there is room beside.
    """
    runner = made_runner(tmp_path, DEVICE, (), config(32, 16, 4, 16))
    wanted = logits_of(runner, 2)
    note_calls(monkeypatch, LocalRows, "dispatch")
    note_calls(monkeypatch, moe, "grouped")
    runner._side = beside
    assert torch.equal(logits_of(runner, 1), wanted[:1]) and wanted.isfinite().all()
    first = ["main records", "dispatch", "side waits", "on side", "on main", "side records"]
    assert [note.split(" for ")[0] for note in NOTES] == [*first, "grouped", "main waits"] * SPARSE
    for n in range(ROWS):
        runner.add(greedy(n, (0,), 2))
    NOTES.clear()
    with torch.inference_mode():
        runner.run(step(0), 2)
    assert NOTES == ["dispatch", "dispatch", "grouped", "grouped"] * SPARSE
    monkeypatch.setattr(moe, "MOST_SIDE_ROWS", ROWS - 1)
    NOTES.clear()
    with torch.inference_mode():
        runner.run(step(1))
    assert NOTES == ["dispatch", "grouped"] * SPARSE


def note_calls(patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    function = getattr(owner, name)

    def call(*args: object) -> object:
        NOTES.append(name)
        return function(*args)

    patch.setattr(owner, name, call)
