"""Log probabilities against torch's log_softmax and a stable sort; what no row asked for stays as it was."""

from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.logprobs import SamplingReport, report
from ep_server.backends.gpu.kernels.triton.sampling import sample
from ep_server.backends.gpu.kernels.triton.sampling_table import Wants
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE, NAN, poisoned, random
from tests.support.triton.sampling_rows import slots_of, space_of, table_of

INF = float("inf")
WIDTH = 6


def reported(logits: torch.Tensor, **settings: float) -> tuple[torch.Tensor, SamplingReport]:
    count, vocab = logits.shape
    table, space, slots = table_of(count, vocab, **settings), space_of(count, vocab, 3), slots_of(count)
    tokens = torch.full((count,), -9, device=DEVICE)
    out = SamplingReport(
        torch.full((count,), NAN, device=DEVICE),
        torch.full((count, WIDTH), NAN, device=DEVICE),
        torch.full((count, WIDTH), -7, dtype=torch.int32, device=DEVICE),
    )
    sample(logits, slots, table, space, tokens, Wants(sum(Wants)))
    report(logits, slots, table, space, tokens, out)
    return tokens, out


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 3.0}, {"top_k": 4}], ids=str)
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize(
    ("vocab", "dtype"), [(5, torch.float32), (300, torch.bfloat16), (5000, torch.float32)], ids=str
)
def test_as_log_softmax(vocab: int, dtype: torch.dtype, count: int, settings: dict[str, float]) -> None:
    """Whatever the temperature; ties by the lower id; in rows of a pitch."""
    logits = poisoned((random(2, vocab) * 3).round(decimals=1).to(dtype), 2)
    tokens, out = reported(logits, reported=count, **settings)
    expected = logits.double().log_softmax(-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]
    own = expected.gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(out.chosen.double(), own, rtol=1e-6, atol=2e-6)
    assert torch.equal(out.ids[:, :count].long(), order)
    assert torch.allclose(out.top[:, :count].double(), expected.gather(1, order), rtol=1e-6, atol=2e-6)
    assert bool(out.top[:, count:].isnan().all()) and bool((out.ids[:, count:] == -7).all())


@pytest.mark.parametrize("kind", ["equal", "few-allowed"])
def test_where_candidates_do_not_do(kind: str) -> None:
    """Too many of them, or fewer than asked for: banned tokens then come last, as -inf."""
    logits = torch.zeros(1, 5000, device=DEVICE)
    if kind == "few-allowed":
        logits[0] = -INF
        logits[0, [4321, 8]] = torch.tensor([0.5, 0.5], device=DEVICE)
    _, out = reported(logits, temperature=0.0, reported=4)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[0, :4]
    assert out.ids[0, :4].tolist() == order.tolist()
    assert torch.allclose(out.top[0, :4], logits.log_softmax(-1)[0, order])


def test_rows_that_did_not_ask_or_have_no_token_get_nothing() -> None:
    logits = random(1, 50)
    _, out = reported(logits, temperature=0.0)
    assert bool(out.chosen.isnan()) and bool(out.top.isnan().all())
    logits[0, 3] = NAN
    _, out = reported(logits, temperature=0.0, reported=2)
    assert bool(out.chosen.isnan()) and bool(out.top.isnan().all())


def test_wrong_inputs_are_named() -> None:
    one = torch.zeros(1, device=DEVICE)
    out = SamplingReport(one, one[None], one[None])
    with pytest.raises(InternalError, match="ids"):
        report(random(1, 9), slots_of(1), table_of(1, 9), space_of(1, 9, 1), one.long(), out)
