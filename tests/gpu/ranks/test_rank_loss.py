"""Ranks on GPUs outlive the loss of another one: no stream ends, every position is published once."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.support.models.answers import Answers
from tests.support.ranks.gpu_streams import NEW, check, config_of, requests
from tests.support.ranks.serving import serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize(("overlap", "mode"), [("off", "auto"), ("on", "auto"), ("off", "normal")])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_other_rank_keeps_its_process(
    answers: dict[str, Answers], number: signal.Signals, overlap: str, mode: str
) -> None:
    """Each rank is lost once, killed or stopped for longer than the hang timeout."""
    model = answers["qwen3_moe"]
    seconds = 60.0 if number is signal.SIGKILL else 3.0
    fields = {"exchange__timeout_seconds": seconds, "parallel__overlap": overlap, "exchange__mode": mode}
    async with serving(config_of(model, **fields)) as served:
        undisturbed = await served.run(requests(model))
        for rank in (1, 0):
            pids = served.group.pids
            outputs = await served.lose(rank, NEW // 2, requests(model), number)
            check(model, outputs, undisturbed)
            assert served.group.pids[1 - rank] == pids[1 - rank]
            assert served.group.pids[rank] != pids[rank]
        check(model, await served.run(requests(model)), undisturbed)
        print("recovered in", [f"{each} s" for each in served.heard.recovered])
