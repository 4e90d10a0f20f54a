"""The native exchange in real processes against sums computed from the seeds of all ranks."""

from __future__ import annotations

import torch

from ep_server.ep.exchange import Payload, Reduction, View
from ep_server.ep.native import NativeExchange
from tests.harness.ranks import run_ranks

HIDDEN, MAX_TOKENS, TOP_K, EXPERTS = 200, 7, 3, 10


def inputs(rank: int, step: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randint(-8, 9, (tokens, HIDDEN), generator=g).float() / 8
    x[:, 0], x[:, 1] = rank, torch.arange(tokens)
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(tokens)]
        or [torch.empty(0, TOP_K, dtype=torch.int64)]
    ).view(tokens, TOP_K)
    ids[torch.rand(ids.shape, generator=g) < 0.15] = -1
    return x, ids, torch.rand(tokens, TOP_K, generator=g)


def cycle(exchange: NativeExchange, view: str, steps: int) -> int:
    spec = exchange.spec
    dtype = exchange.combine_dtype
    total = 0
    for step in range(steps):
        tokens = [(step + r) % (MAX_TOKENS + 1) for r in range(spec.num_ranks)]
        every = [inputs(r, step, t) for r, t in enumerate(tokens)]
        x, ids, w = every[spec.rank]
        got = exchange.dispatch_send(x.to(dtype), ids, w).recv(View(view))
        rows = []
        for e in spec.local_experts:
            for r, (xs, i, _) in enumerate(every):
                rows += [xs[t] for t in range(tokens[r]) if e in i[t]]
        want = torch.stack(rows).to(dtype) if rows else torch.empty(0, HIDDEN, dtype=dtype)
        flat = {
            "compact": lambda: got.rows,
            "padded": lambda: torch.cat([got.rows[e, :c] for e, c in enumerate(got.counts)]),
            "index": lambda: got.rows[got.row_ids],
        }[view]()
        assert torch.equal(flat, want), (step, flat[:, :2], want[:, :2])
        expert_of = torch.repeat_interleave(torch.tensor(spec.local_experts), got.counts.long())
        out = (want.float() * (1 + expert_of[:, None])).to(dtype)
        if view == "padded":
            padded = torch.full_like(got.rows, float("nan"))
            for e in range(len(spec.local_experts)):
                padded[e, : got.counts[e]] = out[got.offsets[e] : got.offsets[e + 1]]
            out = padded
        y = exchange.combine_send(out, got).recv()
        expected = torch.zeros(tokens[spec.rank], HIDDEN)
        for k in range(TOP_K):
            e = ids[:, k]
            rows_k = (x.to(dtype).float() * (1 + e[:, None])).to(dtype).float()
            expected += torch.where(e[:, None] >= 0, w[:, k, None] * rows_k, torch.zeros(()))
        torch.testing.assert_close(
            y.float(),
            expected,
            rtol=2e-2 if dtype == torch.bfloat16 else 1e-5,
            atol=1e-2 if dtype == torch.bfloat16 else 1e-5,
        )
        total += len(rows)
    exchange.barrier()
    return total


def spec_of(num_ranks, **more):
    placement = tuple((e * 7 + 3) % num_ranks for e in range(EXPERTS))
    return {"placement": placement, "max_tokens": MAX_TOKENS, "hidden": HIDDEN, "top_k": TOP_K, **more}


def test_smoke():
    for view in ("compact", "padded", "index"):
        for payload in (Payload.BF16, Payload.FP32):
            for reduction in Reduction:
                r = run_ranks(cycle, 3, spec_of(3, payload=payload, reduction=reduction), 60, args=(view, 12))
                assert sum(r) > 0
