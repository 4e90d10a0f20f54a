"""Against the CPU sampler's arithmetic. Rows without a slot, and what is behind a row, stay as they were."""

from __future__ import annotations

import pytest
import torch

from ep_server.errors import InternalError
from ep_server.model import sampling_ops as ops
from ep_server.model.triton.logit_edits import (
    COUNT_STEP,
    IN_PROMPT,
    BiasLists,
    Penalties,
    add_bias,
    allow_only,
    count_tokens,
    penalise,
)
from tests.model.triton.harness import DEVICE, NAN, poisoned, random

INF = float("inf")
NO_END = 1 << 62


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize("vocab", [40, 5000])
def test_penalties(vocab: int) -> None:
    logits = poisoned(random(4, vocab), 3)
    before = logits.clone()
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(0, 3, (3, vocab), generator=generator, dtype=torch.int32)
    prompt = torch.randint(0, 2, (3, vocab), generator=generator, dtype=torch.int32)
    counts = (drawn * COUNT_STEP + prompt * IN_PROMPT).to(DEVICE)
    slots = [2, -1, 0, 1]
    values = (floats(1.3, 9, 0.7, 1), floats(0.5, 9, 0, -0.25), floats(0.1, 9, -0.2, 0))
    penalise(logits, Penalties(counts, ints(*slots), *values))
    expected = before.cpu()
    seen = [(r, ((drawn + prompt)[s] > 0).nonzero()[:, 0]) for r, s in enumerate(slots) if s >= 0]
    lists = [(r, ids, drawn[slots[r]][ids].float()) for r, ids in seen]
    device = torch.device("cpu")
    ops.penalize(expected, ops.TokenList.of(lists, device), *(v.cpu() for v in values))
    assert torch.allclose(logits.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[1], before[1])


def test_nan_survives_a_penalty() -> None:
    logits = torch.full((1, 4), NAN, device=DEVICE)
    one = floats(1.5)
    penalise(logits, Penalties(ints(2, 0, 1, 2)[None], ints(0), one, one, one))
    assert bool(logits.isnan().all())


def test_bias_holds_until_its_position() -> None:
    """Entries: a bias for ever, a ban until position 3, unused ones; a row whose slot is -1."""
    logits = poisoned(random(4, 33), 2)
    before = logits.clone()
    lists = BiasLists(
        torch.stack([ints(32, 5, -1), ints(-1, -1, 0)]),
        torch.stack([floats(2.5, -INF, NAN), floats(NAN, NAN, -1.0)]),
        torch.tensor([[NO_END, 3, NO_END], [NO_END, NO_END, NO_END]], device=DEVICE),
        ints(0, -1, 0, 1),
    )
    add_bias(logits, lists, torch.tensor([2, 0, 3, 9], device=DEVICE))
    before[0, 32] += 2.5
    before[0, 5] = -INF
    before[2, 32] += 2.5
    before[3, 0] -= 1.0
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [31, 64, 4100])
def test_allowed_tokens(vocab: int) -> None:
    """Bit 31 included; a banned NaN stays NaN."""
    allowed = torch.zeros(2, -(-vocab // 32) * 32, dtype=torch.int64)
    allowed[0, [0, 30, vocab - 1]], allowed[1, : vocab // 2] = 1, 1
    words = (allowed.view(2, -1, 32) << torch.arange(32)).sum(-1)
    logits = random(3, vocab)
    logits[0, 1] = NAN
    before = logits.clone()
    allow_only(logits, words.to(torch.int32).to(DEVICE), ints(0, -1, 1))
    for row, slot in ((0, 0), (2, 1)):
        before[row][allowed[slot, :vocab].to(DEVICE) == 0] += -INF
    assert torch.equal(logits.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))


def test_counting() -> None:
    counts = torch.zeros(3, 10, dtype=torch.int32, device=DEVICE)
    counts[1, 4] = IN_PROMPT
    tokens = torch.tensor([4, 9, -1, 3, 4], device=DEVICE)
    for _ in range(2):
        count_tokens(tokens, counts, ints(1, 0, 2, -1, -1))
    expected = torch.zeros(3, 10, dtype=torch.int32)
    expected[1, 4], expected[0, 9] = IN_PROMPT + 2 * COUNT_STEP, 2 * COUNT_STEP
    assert torch.equal(counts.cpu(), expected)


def test_no_rows() -> None:
    counts, none = torch.zeros(1, 8, dtype=torch.int32, device=DEVICE), torch.empty(0, device=DEVICE)
    penalise(random(0, 8), Penalties(counts, none.int(), none, none, none))
    add_bias(random(0, 8), BiasLists(counts, counts.float(), counts.long(), none.int()), none.long())
    allow_only(random(0, 8), counts[:, :1].contiguous(), none.int())
    count_tokens(none.long(), counts, none.int())
    assert not counts.any()


def test_wrong_inputs_are_named() -> None:
    logits, one = random(1, 8), floats(1.0)
    with pytest.raises(InternalError, match="counts"):
        penalise(logits, Penalties(ints(*range(7))[None], ints(0), one, one, one))
    with pytest.raises(InternalError, match="logits"):
        allow_only(logits.bfloat16(), ints(0)[None], ints(0))
    with pytest.raises(InternalError, match="slots"):
        count_tokens(torch.tensor([1, 2]), ints(*range(8))[None], ints(0))
    with pytest.raises(InternalError, match="until"):
        add_bias(logits, BiasLists(ints(0)[None], one[None], ints(0)[None], ints(0)), torch.tensor([0]))
