"""Log probabilities of a prompt run in chunks are those of its tokens run one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ep_server.backends.gpu.runner import GpuRunner
from ep_server.models import prompt_scorer
from ep_server.records import PromptLogprobs, ScoredRows, SeqSlice, StepBatch
from tests.support.gpu.watched import made_runner
from tests.support.gpu.whole_steps import logits_of
from tests.support.models.driver import BLOCK
from tests.support.ranks.rank_group import greedy, joined

pytestmark = pytest.mark.gpu
IDS, TOP = [(31 * n + n * n) % 3000 for n in range(50)], 3


def scored(runner: GpuRunner, ends: list[int], micro_batches: int) -> PromptLogprobs:
    """Of a prompt that is run in chunks that end there."""
    runner.add(greedy(2, IDS, 1))
    blocks, parts, start = list(range(len(IDS) // BLOCK + 1)), list[PromptLogprobs](), 0
    with torch.inference_mode():
        for end in ends:
            rows = ScoredRows(start, IDS[start + 1 : end + 1], TOP)
            piece = SeqSlice(2, start, IDS[start:end], blocks, end == len(IDS), 1, rows)
            launched = runner.launch(StepBatch((piece,), end - start), micro_batches)
            runner.collect(launched)
            parts += runner.prompt_logprobs(launched)
            start = end
    return joined(parts)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_chunks_are_scored_as_single_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    monkeypatch.setattr(prompt_scorer, "MOST_ROWS", 7)
    runner = made_runner(tmp_path, torch.device("cuda"), (), dtype=torch.float32)
    logits = logits_of(runner, IDS, [(n, n + 1) for n in range(len(IDS) - 1)])
    expected = logits.log_softmax(-1)
    found = scored(runner, [17, 18, 50], micro_batches)
    own = expected.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    assert own.std() > 0.05  # they tell tokens apart
    torch.testing.assert_close(torch.tensor(list(found.logprobs)), own, atol=2e-4, rtol=0)
    top = torch.tensor(list(found.top_logprobs)).view(-1, TOP)
    torch.testing.assert_close(top, expected.topk(TOP).values, atol=2e-4, rtol=0)
