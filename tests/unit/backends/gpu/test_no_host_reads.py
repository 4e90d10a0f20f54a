"""A step is launched without one word from the device: nothing in launch() reads what it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ep_server.backends.gpu.graphs import GraphKey
from tests.support.gpu.watched import HostRead, cpu_watch, decode, made_runner
from tests.support.triton.harness import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="tests/gpu has it for GPUs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of infinities, in the interpreter
]


def test_no_launch_reads_the_device(tmp_path: Path) -> None:
    """Prompts and single tokens, requests that join and leave, every parameter of sampling."""
    runner = made_runner(tmp_path, torch.device("cpu"), (GraphKey(4),))
    launches, padded = decode(runner, 1, cpu_watch)
    assert 0 < padded < launches


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool(x[0] > 0),
        lambda x: int(x[0]),
        lambda x: list(range(x.long()[0])),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), x[:1]),
        lambda x: x.nonzero(),
        torch.nonzero,
        lambda x: torch.equal(x, x),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
    ],
)
def test_the_watch_sees_what_would_wait(read: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3)
    read(x)
    with pytest.raises(HostRead), cpu_watch():
        read(x)
    read(x)


def test_a_step_that_reads_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made_runner(tmp_path, torch.device("cpu"), ())
    sample = runner._sampler.sample
    monkeypatch.setattr(runner._sampler, "sample", lambda *given: (sample(*given), int(given[2].sum()))[0])
    with pytest.raises(HostRead):
        decode(runner, 1, cpu_watch)
