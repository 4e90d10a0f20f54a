"""Chunks for the Hopper kernel of attention, on a GPU or where it is emulated: against float64 of torch.

Unused memory is NaN.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from ep_server.backends.gpu.kernels.hopper.prefill import HopperPrefill, prefill_scratch
from ep_server.backends.gpu.kernels.triton.paged import Sequences
from ep_server.models.families.spec import GqaSpec
from tests.support.triton.harness import DEVICE, random
from tests.support.triton.paged_case import Heads, PagedCase

BF16, NAN, SCALE = torch.bfloat16, float("nan"), 0.1
COUNTERS = 8192  # bytes at the end of the scratch memory
Chunks = list[tuple[int, int]]  # (context with the chunk, tokens of the chunk)
# As a step may have them: single tokens have no rows here.
MIXED: Chunks = [(30, 0), (1, 1), (200, 200), (0, 0), (777, 77), (129, 1), (128, 128), (1000, 3)]


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def check(chunks: Chunks, heads: tuple[int, int] = (32, 4), block: int = 16) -> None:
    """Runs the chunks twice in the same scratch memory, and compares each row.

    Rows behind the last chunk must stay as they were.
    """
    case = PagedCase.of([context for context, _ in chunks], Heads(*heads, 128, 128), block, BF16)
    starts = [0, *accumulate(tokens for _, tokens in chunks)]
    q = random(starts[-1] + 5, heads[0], 128, seed=1).to(BF16)
    q[starts[-1] :] = NAN
    spec, blocks, lengths = GqaSpec(*heads, 128, SCALE), case.sequences.blocks, case.sequences.lengths
    scratch = prefill_scratch(q.device)
    scratch[:-COUNTERS] = 255  # NaN
    begin = torch.tensor(starts, device=DEVICE).int()
    once, again = (torch.full_like(q, NAN) for _ in range(2))
    for out in (once, again):
        HopperPrefill(case.kv, spec, scratch).run(q, begin, Sequences(blocks.int(), lengths.int()), out)
    synchronize()
    assert not scratch[-COUNTERS:].any()
    assert torch.equal(once[: starts[-1]], again[: starts[-1]])
    assert bool(once[starts[-1] :].isnan().all())
    check_rows(case, chunks, starts, heads, q, once)


def check_rows(
    case: PagedCase,
    chunks: Chunks,
    starts: list[int],
    heads: tuple[int, int],
    q: torch.Tensor,
    out: torch.Tensor,
) -> None:
    for s, ((begin, end), (context, tokens)) in enumerate(zip(pairwise(starts), chunks, strict=True)):
        if tokens == 0:
            continue
        group = heads[0] // heads[1]
        keys, values = (
            x.double().to(DEVICE).repeat_interleave(group, 1) for x in (case.keys[s], case.values[s])
        )
        scores = torch.einsum("thd,phd->htp", q[begin:end].double(), keys) * SCALE
        positions = torch.arange(context - tokens, context, device=DEVICE)
        unseen = torch.arange(context, device=DEVICE) > positions[:, None]
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        expected = torch.einsum("htp,phd->thd", weights, values)
        error = (out[begin:end].double() - expected).abs().amax() / expected.abs().amax()
        assert error < 0.01, (s, context, tokens, float(error))
