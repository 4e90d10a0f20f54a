"""As the CPU sampler edits. Rows that ask for nothing, and what is behind a row, do not change."""

from __future__ import annotations

import pytest
import torch

from ep_server.backends.cpu import sampling_ops as ops
from ep_server.backends.gpu.kernels.triton.logit_edits import add_listed, advance, allow_only, penalise
from ep_server.backends.gpu.kernels.triton.sampling_table import COUNT_STEP, IN_PROMPT, SamplingTable, Wants
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE, NAN, poisoned, random

INF = float("inf")
STEP, PROMPT = COUNT_STEP.value, IN_PROMPT.value


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def wanting(vocab: int, *wants: Wants) -> SamplingTable:
    """A slot for each, full of what must not be read without them."""
    table = SamplingTable.of(len(wants), vocab, DEVICE)
    table.floats.fill_(NAN)
    for part in (table.counts, table.tokens, table.masks):
        part.fill_(3)
    table.values.fill_(NAN)
    table.longs[:, 5] = torch.tensor([int(want) for want in wants])
    return table


@pytest.mark.parametrize("vocab", [40, 5000])
def test_penalties(vocab: int) -> None:
    logits = poisoned(random(4, vocab), 3)
    before = logits.clone()
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(0, 3, (3, vocab), generator=generator, dtype=torch.int32)
    prompt = torch.randint(0, 2, (3, vocab), generator=generator, dtype=torch.int32)
    table = wanting(vocab, *[Wants.PENALTY] * 3, Wants.MASK)
    table.counts[:3] = (drawn * STEP + prompt * PROMPT).to(DEVICE)
    slots = [2, 3, 0, 1]
    values = torch.tensor([[1.3, 0.5, 0.1], [NAN] * 3, [0.7, 0, -0.2], [1, -0.25, 0]])  # by row
    table.floats[slots, 3:6] = values.to(DEVICE)
    penalise(logits, ints(*slots), table)
    expected = before.cpu()
    seen = [(r, ((drawn + prompt)[s] > 0).nonzero()[:, 0]) for r, s in enumerate(slots) if s < 3]
    lists = [(r, ids, drawn[slots[r]][ids].float()) for r, ids in seen]
    ops.penalize(expected, ops.TokenList.of(lists, torch.device("cpu")), *values.T.contiguous())
    assert torch.allclose(logits.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[1], before[1])


def test_nan_survives_a_penalty() -> None:
    logits = torch.full((1, 4), NAN, device=DEVICE)
    table = wanting(4, Wants.PENALTY)
    table.floats[0, 3:6] = 1.5
    penalise(logits, ints(0), table)
    assert bool(logits.isnan().all())


def test_a_listed_token_is_banned_until_enough_are_drawn() -> None:
    """Slot 0: a bias, and a biased stop; drawn 2, then 3 of the 3 that are needed. Slot 1: nothing listed."""
    logits = poisoned(random(3, 33), 2)
    logits[2, 5] = NAN
    before, table = logits.clone(), wanting(33, Wants.LIST, Wants.NOTHING, Wants.LIST)
    for slot, drawn in ((0, 2), (2, 3)):
        table.longs[slot, 4], table.longs[slot, 2] = 2, drawn
        table.tokens[slot, :2], table.values[slot, :2] = ints(32, 5), floats(2.5, -1.0)
        table.until[slot, :2] = ints(0, 3)
    add_listed(logits, ints(0, 1, 2), table)
    before[0, 32] += 2.5
    before[0, 5] = -INF
    before[2, 32] += 2.5
    assert bool(logits[2, 5].isnan())
    assert torch.equal(logits.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))


def test_the_longest_list() -> None:
    logits, table = random(1, 3000), wanting(3000, Wants.LIST)
    before, length = logits.clone(), table.tokens.shape[1]
    table.longs[0, 4], table.until[0] = length, 0
    table.tokens[0] = torch.arange(length, device=DEVICE).flip(0)
    table.values[0] = 0.5
    add_listed(logits, ints(0), table)
    before[0, :length] += 0.5
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [31, 64, 4100])
def test_allowed_tokens(vocab: int) -> None:
    """Bit 31 included; a banned NaN stays NaN."""
    allowed = torch.zeros(2, -(-vocab // 32) * 32, dtype=torch.int64)
    allowed[0, [0, 30, vocab - 1]], allowed[1, : vocab // 2] = 1, 1
    words = (allowed.view(2, -1, 32) << torch.arange(32)).sum(-1)
    logits, table = random(3, vocab), wanting(vocab, Wants.MASK, Wants.MASK, Wants.PENALTY)
    table.masks[:2] = words.to(torch.int32).to(DEVICE)
    logits[0, 1] = NAN
    before = logits.clone()
    allow_only(logits, ints(0, 2, 1), table)
    for row, slot in ((0, 0), (2, 1)):
        before[row][allowed[slot, :vocab].to(DEVICE) == 0] += -INF
    assert torch.equal(logits.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))


def test_what_was_drawn_is_counted() -> None:
    """Positions of all slots; tokens of those with penalties; a row without a token counts nothing."""
    table = wanting(10, Wants.PENALTY, Wants.DRAW, Wants.PENALTY, Wants.PENALTY)
    table.counts.zero_()
    table.counts[1, 4] = table.counts[2, 9] = PROMPT
    tokens = torch.tensor([9, 4, -1], device=DEVICE)
    told = torch.full((3,), 77, device=DEVICE)
    for _ in range(2):
        advance(tokens, ints(2, 1, 0), table, told)
    assert torch.equal(told, tokens)
    expected = torch.zeros(4, 10, dtype=torch.int32)
    expected[1, 4], expected[2, 9] = PROMPT, PROMPT + 2 * STEP
    assert torch.equal(table.counts.cpu(), expected)
    assert table.longs[:, 2].tolist() == [0, 2, 2, 0]


def test_more_rows_than_a_program_counts() -> None:
    table = wanting(4, *[Wants.PENALTY] * 300)
    table.counts.zero_()
    slots = torch.arange(300, dtype=torch.int32, device=DEVICE).flip(0)
    tokens, told = torch.arange(300, device=DEVICE) % 4, torch.full((301,), 77, device=DEVICE)
    advance(tokens, slots, table, told[:300])
    assert torch.equal(told[:300], tokens) and int(told[300]) == 77
    expected = torch.nn.functional.one_hot(torch.arange(300) % 4, 4).flip(0) * STEP
    assert torch.equal(table.counts.cpu().long(), expected)


def test_no_rows() -> None:
    table, none = wanting(8, Wants.PENALTY), ints()
    for edit in (penalise, add_listed, allow_only):
        edit(random(0, 8), none, table)
    advance(none.long(), none, table, none.long())
    assert bool((table.counts == 3).all())


def test_wrong_inputs_are_named() -> None:
    logits, table = random(1, 8), wanting(7, Wants.PENALTY)
    with pytest.raises(InternalError, match="counts"):
        penalise(logits, ints(0), table)
    with pytest.raises(InternalError, match="logits"):
        allow_only(logits.bfloat16(), ints(0), table)
    with pytest.raises(InternalError, match="slots"):
        advance(torch.tensor([1, 2], device=DEVICE), ints(0), table, torch.tensor([1, 2], device=DEVICE))
    with pytest.raises(InternalError, match="host_tokens"):
        advance(torch.tensor([1], device=DEVICE), ints(0), table, torch.tensor([1, 2], device=DEVICE))
