"""Chunks for the Hopper kernel of latent attention, on given keys and values: against float64 of torch."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from ep_server.backends.gpu.kernels.hopper.prefill import HopperLatentPrefill, prefill_scratch
from ep_server.backends.gpu.kernels.triton.expand import TILE, ExpandedKv
from ep_server.backends.gpu.kernels.triton.paged import Sequences
from tests.support.gpu.prefill_case import BF16, COUNTERS, NAN, Chunks, synchronize
from tests.support.triton.harness import DEVICE

SCALE = 0.07
NOPE, ROPE, V_DIM, LATENT = 128, 64, 128, 512


def expected(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int, scale: float = SCALE
) -> torch.Tensor:
    """q: [t, heads, 192]; keys, values: [context, heads, dim]; all float64. Returns [t, heads, 128]."""
    scores = torch.einsum("thd,phd->htp", q, keys) * scale
    positions = torch.arange(context - len(q), context, device=q.device)
    unseen = torch.arange(context, device=q.device) > positions[:, None]
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("htp,phd->thd", weights, values)


class Case:
    """Sequences in tiles that are dealt out of order. Rows of q and out have more heads than the kernel's."""

    def __init__(self, chunks: Chunks, heads: int = 3, more: int = 2) -> None:
        if DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE)[0] != 9:
            pytest.skip("the kernel is for Hopper")
        torch.manual_seed(len(chunks) + heads)
        self.chunks, self.heads = chunks, heads
        counts = [-(-context // TILE) for context, _ in chunks]
        order = torch.randperm(sum(counts) + 2).tolist()
        table = torch.full((len(chunks), max(counts) + 2), 1 << 23, dtype=torch.int32)
        positions = len(order) * TILE
        k = torch.full((heads, positions, NOPE), NAN, device=DEVICE, dtype=BF16)
        v = torch.full((heads, positions, V_DIM), NAN, device=DEVICE, dtype=BF16)
        rope = torch.full((positions, ROPE), NAN, device=DEVICE, dtype=BF16)
        self.kv, self.keys, self.values = ExpandedKv(k, v, rope), list[torch.Tensor](), list[torch.Tensor]()
        for s, ((context, _), count) in enumerate(zip(chunks, counts, strict=True)):
            mine, order = order[:count], order[count:]
            table[s, :count] = torch.tensor(mine, dtype=torch.int32)
            at = torch.tensor(
                [mine[p // TILE] * TILE + p % TILE for p in range(context)], device=DEVICE
            ).long()
            for each in (k, v, rope):
                each[..., at, :] = torch.randn(*each.shape[:-2], context, each.shape[-1], device=DEVICE).to(
                    BF16
                )
            shared = rope[at].expand(heads, context, ROPE)
            self.keys.append(torch.cat([k[:, at], shared], 2).transpose(0, 1).double())
            self.values.append(v[:, at].transpose(0, 1).double())
        self.starts = [0, *accumulate(tokens for _, tokens in chunks)]
        rows = self.starts[-1] + 5
        self.q = torch.randn(rows, heads + more, NOPE + ROPE, device=DEVICE).to(BF16)
        self.q[self.starts[-1] :] = NAN
        lengths = torch.tensor([context for context, _ in chunks], dtype=torch.int32, device=DEVICE)
        self.sequences = Sequences(table.to(DEVICE), lengths)
        self.begin = torch.tensor(self.starts, device=DEVICE).int()
        synchronize()

    def run(self, kernel: HopperLatentPrefill, first: int = 1) -> torch.Tensor:
        """Rows of the heads from `first` on, which the kernel has. It writes no other rows or heads."""
        out = torch.full((*self.q.shape[:2], V_DIM), NAN, device=DEVICE, dtype=BF16)
        some = slice(first, first + self.heads)
        kernel.run(self.q[:, some], self.begin, self.sequences, out[:, some])
        synchronize()
        assert bool(out[:, :first].isnan().all()) and bool(out[:, first + self.heads :].isnan().all())
        assert bool(out[self.starts[-1] :].isnan().all())
        return out[:, some]

    def check(self, out: torch.Tensor, first: int = 1) -> None:
        for s, ((begin, end), (context, tokens)) in enumerate(
            zip(pairwise(self.starts), self.chunks, strict=True)
        ):
            if tokens == 0:
                continue
            q = self.q[begin:end, first : first + self.heads].double()
            wanted = expected(q, self.keys[s], self.values[s], context)
            error = (out[begin:end].double() - wanted).abs().amax() / wanted.abs().amax()
            assert error < 0.01, (s, context, tokens, float(error))


def check(chunks: Chunks, heads: int = 3) -> None:
    """Twice in the same scratch memory."""
    case = Case(chunks, heads)
    scratch = prefill_scratch(case.q.device)
    scratch[:-COUNTERS] = 255  # NaN
    kernel = HopperLatentPrefill(case.kv, SCALE, scratch)
    once, again = case.run(kernel), case.run(kernel)
    case.check(once)
    used = case.starts[-1]
    assert torch.equal(once[:used], again[:used]) and not scratch[-COUNTERS:].any()
