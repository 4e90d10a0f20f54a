from __future__ import annotations

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.paged import AttentionRule
from ep_server.backends.gpu.kernels.triton.paged_prefill import prefill
from ep_server.errors import InternalError
from tests.support.triton.harness import DEVICE, FP8, NAN, assert_near, random
from tests.support.triton.paged_case import Heads, PagedCase

GQA, ODD, LATENT = Heads(8, 2, 32, 32), Heads(7, 1, 20, 12), Heads(18, 1, 40, None, latent=32)
TYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.bfloat16, FP8),
}
# (context with the chunk, tokens of the chunk): a first chunk, a decoding token, padding, a later chunk of
# more than one tile, a padding sequence at the end
CHUNKS = [(5, 5), (33, 1), (0, 0), (60, 21), (0, 0)]


def run(case: PagedCase, q: torch.Tensor, starts: list[int], rule: AttentionRule) -> torch.Tensor:
    out = torch.full((*q.shape[:2], case.kv.layer.v_dim), NAN, dtype=q.dtype, device=DEVICE)
    prefill(q, torch.tensor(starts, device=DEVICE), case.kv, case.sequences, rule, out)
    return out


def offsets(chunks: list[tuple[int, int]]) -> list[int]:
    starts = [0]
    for _, tokens in chunks:
        starts.append(starts[-1] + tokens)
    return starts


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("heads", [GQA, ODD, LATENT], ids=("gqa", "odd", "mla"))
def test_prefill(heads: Heads, window: int, types: str) -> None:
    """Three rows of padding behind the last chunk are NaN, and stay as they were in the output."""
    dtype, cache = TYPES[types]
    starts = offsets(CHUNKS)
    case = PagedCase.of([context for context, _ in CHUNKS], heads, 5, cache)
    q = random(starts[-1] + 3, heads.heads, heads.k_dim, dtype=dtype, seed=1)
    q[starts[-1] :] = NAN
    if cache is FP8 and heads.k_dim % 8:
        with pytest.raises(InternalError, match="must be multiples of 8"):
            run(case, q, starts, AttentionRule(0.3, window))
        return
    got = run(case, q, starts, AttentionRule(0.3, window))
    assert bool(got[starts[-1] :].isnan().all())
    for s, (context, tokens) in enumerate(CHUNKS):
        for i in range(tokens):
            row = starts[s] + i
            expected = case.attend(s, q[row], context - tokens + i, 0.3, window)
            assert_near(got[row], expected, 4)


@pytest.mark.parametrize("count", [64, 65, pytest.param(140, marks=pytest.mark.slow)])
def test_more_chunks_than_a_program_looks_at_at_once(count: int) -> None:
    """Some of them padding, of no tokens."""
    chunks = [(0, 0) if n % 9 == 4 else (2 + n % 3, 2) for n in range(count)]
    starts, case = offsets(chunks), PagedCase.of([context for context, _ in chunks], GQA, 4, torch.float32)
    q = random(starts[-1] + 1, 8, 32)
    got = run(case, q, starts, AttentionRule(0.3))
    assert bool(got[starts[-1] :].isnan().all())
    for s, (context, tokens) in enumerate(chunks):
        for i in range(tokens):
            expected = case.attend(s, q[starts[s] + i], context - tokens + i, 0.3, 0)
            assert_near(got[starts[s] + i], expected)


def test_a_chunk_cut_in_two_gives_the_same() -> None:
    case = PagedCase.of([30], GQA, 16, torch.float32)
    q = random(30, 8, 32)
    whole = run(case, q, [0, 30], AttentionRule(0.3))
    first = PagedCase.of([30], GQA, 16, torch.float32)
    first.sequences.lengths.fill_(11)
    assert_near(run(first, q[:11].clone(), [0, 11], AttentionRule(0.3)), whole[:11].double())
    assert_near(run(case, q[11:].clone(), [0, 19], AttentionRule(0.3)), whole[11:].double())


def test_no_tokens() -> None:
    case = PagedCase.of([0, 0], GQA, 16, torch.float32)
    assert run(case, random(0, 8, 32), [0, 0, 0], AttentionRule(0.3)).shape == (0, 8, 32)
    assert bool(run(case, random(2, 8, 32), [0, 0, 0], AttentionRule(0.3)).isnan().all())


def test_wrong_inputs_are_named() -> None:
    case = PagedCase.of([5], GQA, 16, torch.float32)
    with pytest.raises(InternalError, match="query_start"):
        run(case, random(5, 8, 32), [0, 3, 5], AttentionRule(0.3))
    with pytest.raises(InternalError, match="q: "):
        run(case, random(5, 8, 31), [0, 5], AttentionRule(0.3))
