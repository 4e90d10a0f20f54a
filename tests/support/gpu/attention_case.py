"""A paged cache with single tokens to attend from, and attention of torch in float64 over it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ep_server.backends.gpu.kernels.hopper.attention import (
    HopperAttention,
    HopperAttentionStep,
    LaunchConfig,
    hopper_attention_fits,
)
from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.backends.gpu.kernels.triton.rope import HeadNorm
from ep_server.backends.gpu.step_input import Singles, StepTensors
from ep_server.models.families.spec import GqaSpec
from ep_server.models.kv_cache import KvLayer

BF16, NAN, DIM, EPS = torch.bfloat16, float("nan"), 128, 1e-6


@dataclass
class Case:
    """A cache whose unused slots are NaN, also those of the tokens at hand, and their projections.

    keys, values: of the positions before, by sequence. blocks: of each sequence. was: the cache as it began.
    """

    kv: PagedKv
    spec: GqaSpec
    step: StepTensors
    qkv: torch.Tensor
    norm: HeadNorm | None
    table: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: list[int]
    blocks: list[list[int]]
    was: list[torch.Tensor]

    @staticmethod
    def of(
        lengths: list[int], heads: tuple[int, int] = (32, 4), block: int = 16, *, norm: bool = True
    ) -> Case:
        """Blocks are dealt out of order; table entries past a sequence's end point far outside."""
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("the kernel is for Hopper")
        torch.manual_seed(len(lengths) + sum(heads))
        q_heads, kv_heads = heads
        counts = [-(-n // block) for n in lengths]
        order = torch.randperm(sum(counts) + 3).tolist()
        table = torch.full((len(lengths), max(counts) + 2), 1 << 29, dtype=torch.int32)
        k, v = (torch.full((len(order), block, kv_heads, DIM), NAN, device="cuda", dtype=BF16) for _ in "kv")
        keys, values, slots, blocks = [], [], [], []
        for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            mine, order = order[:count], order[count:]
            blocks.append(mine)
            table[s, :count] = torch.tensor(mine, dtype=torch.int32)
            places = [mine[p // block] * block + p % block for p in range(length)]
            slots.append(places[-1] if places else -1)
            for cache, kept in ((k, keys), (v, values)):
                rows = torch.randn(max(length - 1, 0), kv_heads, DIM, device="cuda").to(BF16)
                cache.flatten(0, 1)[torch.tensor(places[:-1], dtype=torch.int64, device="cuda")] = rows
                kept.append(rows)
        ints = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (slots, lengths)]
        none = torch.zeros(0, dtype=torch.int32, device="cuda")
        rows = len(lengths)
        positions = (ints[1] - 1).clamp(min=0)
        ids = torch.zeros(rows, dtype=torch.int32, device="cuda")
        tables = table.cuda()[:, :-1]  # rows have a pitch
        step = StepTensors(
            ids, none, none, positions, ints[0], tables, ints[1], Singles(ints[1], ints[0]), None, None, none
        )
        width = (q_heads + 2 * kv_heads) * DIM
        wide = torch.full((rows, width + 40), NAN, device="cuda", dtype=BF16)
        wide[:, :width] = torch.randn(rows, width, device="cuda")
        wide[[s for s, n in enumerate(lengths) if n == 0]] = NAN
        weight = (1 + 0.3 * torch.randn(q_heads + kv_heads, DIM, device="cuda")).to(BF16)
        angle = torch.outer(
            torch.arange(max(lengths) + 1.0), 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
        )
        turns = torch.stack((angle.cos(), angle.sin()), -1).cuda()
        spec = GqaSpec(q_heads, kv_heads, DIM, DIM**-0.5)
        kv = PagedKv(KvLayer(k, v, DIM))
        given = HeadNorm(weight, EPS) if norm else None
        was = [bits(cache).clone() for cache in (k, v)]
        torch.cuda.synchronize()  # lengths and tables are read before the kernel ahead has ended
        return Case(kv, spec, step, wide[:, :width], given, turns, keys, values, lengths, blocks, was)

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values: [slots, kv_heads, 128]."""
        k, v = self.kv.layer.k, self.kv.layer.v
        assert v is not None
        return k.flatten(0, 1), v.flatten(0, 1)

    def kernel(self) -> HopperAttention:
        assert hopper_attention_fits(self.kv, self.spec)
        return HopperAttention(self.kv, self.spec, self.table, self.norm)

    def run(self, config: LaunchConfig, qkv: torch.Tensor | Partial | None = None) -> torch.Tensor:
        step = HopperAttentionStep(self.step, self.spec, config)
        step.shares.sums.fill_(NAN)
        step.shares.stats.fill_(NAN)
        out = torch.full((len(self.lengths), self.spec.heads, DIM), NAN, device="cuda", dtype=BF16)
        self.kernel().run(self.qkv if qkv is None else qkv, step, out)
        return out

    def token(self, s: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q: [heads, 128], k and v: [kv_heads, 128] of a sequence's token, float64, rounded to bfloat16."""
        spec = self.spec
        rows = self.qkv[s].double().view(-1, DIM)
        turned, v = rows[: spec.heads + spec.kv_heads], rows[spec.heads + spec.kv_heads :]
        if self.norm is not None:
            turned = turned / (turned.square().mean(1, keepdim=True) + EPS).sqrt()
            turned = turned * self.norm.weight.double()
        cos, sin = self.table[self.lengths[s] - 1].double().unbind(-1)
        a, b = turned[:, 0::2], turned[:, 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(1).to(BF16).double()
        return turned[: spec.heads], turned[spec.heads :], v

    def check(self, out: torch.Tensor) -> None:
        """Answers, and what the cache holds now: each token's own, all else as it was, bit for bit."""
        spec, slots, (k, v) = self.spec, self.step.slots.tolist(), self.caches
        for s, length in enumerate(self.lengths):
            if length == 0:
                assert not out[s].any()
                continue
            query, key, value = self.token(s)
            torch.testing.assert_close(k[slots[s]].double(), key, rtol=2.0**-7, atol=1e-3)
            assert torch.equal(v[slots[s]].double(), value)
            keys = torch.cat((self.keys[s].double(), k[slots[s]].double()[None]))
            values = torch.cat((self.values[s].double(), value[None]))
            group = spec.heads // spec.kv_heads
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            weights = torch.softmax(torch.einsum("phd,hd->hp", keys, query) * spec.scale, 1)
            wanted = torch.einsum("hp,phd->hd", weights, values)
            # Rounding gives a third of it at most; a tile that is lost, of any context, ten times as much.
            may = 0.02 * (wanted.abs() + weights.norm(dim=1, keepdim=True))
            off = ((out[s].double() - wanted).abs() / may).nan_to_num(torch.inf).max()
            assert off <= 1, f"sequence {s} of {length}: {float(off):.2f} of what may be"
        others = torch.ones(len(k), dtype=torch.bool, device="cuda")
        others[[slot for slot in slots if slot >= 0]] = False
        for cache, was in zip((k, v), self.was, strict=True):
            assert torch.equal(bits(cache)[others], was.flatten(0, 1)[others])


def bits(x: torch.Tensor) -> torch.Tensor:
    """x: bfloat16. Such that NaNs compare too."""
    return x.view(torch.int16)
