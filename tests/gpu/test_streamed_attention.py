"""The attention kernel for Hopper against float64 attention of torch: norm, rotation, cache and softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from ep_server.model.families.spec import GqaSpec
from ep_server.model.gpu.step_input import StepTensors
from ep_server.model.gpu.streamed_attention import (
    Manner,
    StreamedAttention,
    StreamedStep,
    attention_streamable,
    manner_for,
)
from ep_server.model.kv_cache import KvLayer
from ep_server.model.triton.paged import PagedKv
from ep_server.model.triton.partial import Partial
from ep_server.model.triton.rope import HeadNorm

pytestmark = pytest.mark.gpu
BF16, NAN, DIM, EPS = torch.bfloat16, float("nan"), 128, 1e-6
HEADS = [(32, 4), (32, 8), (16, 16), (8, 1), (6, 2), (5, 1)]
MANNERS = [Manner(16, 132), Manner(8, 264), Manner(8, 7), Manner(16, 1), Manner(8, 2)]
PLAIN = Manner(8, 264)
LENGTHS = [1, 0, 16, 17, 15, 33, 64, 130, 255, 256, 300, 1000]


@dataclass
class Case:
    """A cache whose unused slots are NaN, also those of the tokens at hand, and their projections."""

    kv: PagedKv
    spec: GqaSpec
    step: StepTensors
    qkv: torch.Tensor
    norm: HeadNorm | None
    table: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: list[int]

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
        keys, values, slots = [], [], []
        for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            mine, order = order[:count], order[count:]
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
        step = StepTensors(ids, none, none, positions, ints[0], table.cuda(), ints[1], none, rows, None, none)
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
        torch.cuda.synchronize()  # the cache is read before the kernel ahead has ended
        return Case(kv, spec, step, wide[:, :width], given, turns, keys, values, lengths)

    def kernel(self) -> StreamedAttention:
        assert attention_streamable(self.kv, self.spec)
        return StreamedAttention(self.kv, self.spec, self.table, self.norm)

    def run(self, manner: Manner, qkv: torch.Tensor | Partial | None = None) -> torch.Tensor:
        step = StreamedStep(self.step, self.spec.heads, manner)
        if step.workspace is not None:
            step.workspace.sums.fill_(NAN)
            step.workspace.stats.fill_(NAN)
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
        """Answers, and what the cache holds now: each token's own, and nothing else new."""
        spec, slots = self.spec, self.step.slots.tolist()
        k, v = self.kv.layer.k.flatten(0, 1), self.kv.layer.v
        assert v is not None
        for s, length in enumerate(self.lengths):
            if length == 0:
                assert not out[s].any()
                continue
            query, key, value = self.token(s)
            torch.testing.assert_close(k[slots[s]].double(), key, rtol=2.0**-7, atol=1e-3)
            assert torch.equal(v.flatten(0, 1)[slots[s]].double(), value)
            keys = torch.cat((self.keys[s].double(), k[slots[s]].double()[None]))
            values = torch.cat((self.values[s].double(), value[None]))
            group = spec.heads // spec.kv_heads
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            weights = torch.softmax(torch.einsum("phd,hd->hp", keys, query) * spec.scale, 1)
            wanted = torch.einsum("hp,phd->hd", weights, values)
            torch.testing.assert_close(out[s].double(), wanted, rtol=2e-2, atol=1e-2)
        used = sum(self.lengths)
        for cache in (k, v.flatten(0, 1)):
            assert int((~cache.isnan().any(-1).any(-1)).sum()) == used


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("manner", MANNERS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_length(heads: tuple[int, int], manner: Manner, splits: int) -> None:
    case = Case.of(LENGTHS, heads)
    case.check(case.run(replace(manner, splits=splits)))


@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("norm", [True, False])
def test_blocks_and_norms(block: int, norm: bool) -> None:
    case = Case.of(LENGTHS, block=block, norm=norm)
    case.check(case.run(PLAIN))


@pytest.mark.parametrize("parts", [1, 3])
def test_partial_sums(parts: int) -> None:
    """Bit for bit what the rounded product gives."""
    case = Case.of(LENGTHS)
    sums = torch.randn(parts, *case.qkv.shape, device="cuda")
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    case.qkv = total.to(BF16)
    torch.cuda.synchronize()
    got = case.run(PLAIN, Partial(sums))
    case.check(got)
    assert torch.equal(got, case.run(PLAIN))


@pytest.mark.parametrize("rows", [1, 8, 32, 33, 64, 128, 200])
def test_batches_as_a_rank_runs_them(rows: int) -> None:
    lengths = [130 + 7 * (n % 31) for n in range(rows)]
    case = Case.of(lengths)
    case.check(case.run(manner_for(rows, 4, 132, 4096)))


def test_long_contexts() -> None:
    case = Case.of([9000, 5, 4097])
    for splits in (1, 16, 64):
        case.check(case.run(Manner(16, 132, splits)))


def test_large_scores_do_not_overflow() -> None:
    case = Case.of([100, 300], norm=False)
    case.qkv *= 300.0
    torch.cuda.synchronize()
    assert case.run(PLAIN).isfinite().all()


def test_behind_a_slow_kernel_it_waits_for_the_projections() -> None:
    """What it reads early is the cache alone; a graph of it and what makes its input can be replayed."""
    case = Case.of([40, 257, 130])
    wanted, made = case.run(PLAIN), torch.zeros_like(case.qkv)
    step, out = StreamedStep(case.step, case.spec.heads, PLAIN), torch.empty_like(wanted)
    kernel = case.kernel()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(1_000_000)
        made.copy_(case.qkv)
        kernel.run(made, step, out)
    for _ in range(3):
        made.fill_(NAN)
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, wanted)
