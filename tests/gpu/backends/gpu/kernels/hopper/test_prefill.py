"""The Hopper kernel for attention of chunks: against float64 attention of torch. Unused memory is NaN.

The same over FP8 caches, whose blocks are widened first.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from ep_server.backends.gpu.attention.widened import WidenedPrefill
from ep_server.backends.gpu.chunk_copies import CopiedBlocks, CopiedBlocksInput
from ep_server.backends.gpu.kernels.hopper.prefill import HopperPrefill, prefill_scratch
from ep_server.backends.gpu.kernels.triton.paged import Sequences
from ep_server.backends.gpu.widening import Widening
from ep_server.errors import InternalError
from ep_server.models.families.spec import GqaSpec
from tests.support.gpu.prefill_case import BF16, MIXED, NAN, SCALE, check, check_rows
from tests.support.triton.harness import FP8
from tests.support.triton.paged_case import Heads, PagedCase

pytestmark = pytest.mark.gpu
GQA = (32, 4)


@pytest.mark.parametrize("heads", [GQA, (32, 8), (8, 8), (10, 2), (32, 1), (5, 1)], ids=str)
def test_chunks_of_a_step(heads: tuple[int, int]) -> None:
    check(MIXED, heads)


def test_whole_contexts() -> None:
    """With so many tiles of rows none is cut into parts."""
    check(MIXED * 8)


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128, 256])
def test_blocks_of_each_size(block: int) -> None:
    check([(1000, 100), (77, 50), (300, 300), (257, 1)], block=block)


@pytest.mark.parametrize("end", [15, 16, 17, 127, 128, 129, 255, 256, 257, 383, 384, 385, 513])
def test_ends_of_tiles_and_of_the_ring(end: int) -> None:
    check([(end, end), (end + 128, 16), (end + 700, min(end, 33))])


def test_many_chunks() -> None:
    """Over 32, so many are looked up at once, with some that have no tokens."""
    check([(40 + 3 * n, 0 if n % 7 == 3 else 1 + n % 5) for n in range(300)])


def test_more_items_than_multiprocessors() -> None:
    check([(3000, 2500), (600, 600)], (16, 2))


@pytest.mark.parametrize("tokens", [1, 16, 33, 300, 450, 700])
@pytest.mark.parametrize("context", [1500, 9000])
def test_few_tokens_behind_a_long_context(context: int, tokens: int) -> None:
    check([(context, tokens), (0, 0), (40, 5)])


def test_parts_of_short_and_long_contexts() -> None:
    check([(5000, 16), (130, 16), (60, 3), (257, 20)], (8, 8))
    check([(6000, 128)], (4, 4))  # rows of the first tokens see nothing of the last part


def test_padding_alone() -> None:
    check([(0, 0), (0, 0)])


def test_a_captured_launch_reads_its_arguments_from_memory() -> None:
    """Replays give what other lengths, tables and queries ask for."""
    case = PagedCase.of([300, 40], Heads(*GQA, 128, 128), 16, BF16)
    kernel = HopperPrefill(case.kv, GqaSpec(*GQA, 128, SCALE), prefill_scratch(case.kv.layer.k.device))
    q = torch.randn(64, 32, 128, device="cuda").to(BF16)
    starts = torch.tensor([0, 20, 60], device="cuda").int()
    sequences = Sequences(case.sequences.blocks.int(), case.sequences.lengths.int())
    out = torch.zeros_like(q)
    kernel.run(q, starts, sequences, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(q, starts, sequences, out)
    q.copy_(torch.randn(64, 32, 128, device="cuda"))
    starts.copy_(torch.tensor([0, 33, 40]))
    sequences.lengths.copy_(torch.tensor([290, 17]))
    out.zero_()
    graph.replay()
    again = torch.zeros_like(q)
    kernel.run(q, starts, sequences, again)
    torch.cuda.synchronize()
    assert torch.equal(out, again)
    assert bool(out[:40].any(dim=(1, 2)).all()) and not bool(out[40:].any())


class Widened:
    """Chunks over an FP8 cache, with room for some more blocks in the copy than they have."""

    def __init__(
        self, chunks: list[tuple[int, int]], heads: tuple[int, int] = GQA, block: int = 16, more: int = 3
    ) -> None:
        self.chunks, self.heads = chunks, heads
        self.case = PagedCase.of([context for context, _ in chunks], Heads(*heads, 128, 128), block, FP8)
        self.starts = [0, *accumulate(tokens for _, tokens in chunks)]
        self.q = torch.randn(self.starts[-1] + 5, heads[0], 128, device="cuda").to(BF16)
        self.q[self.starts[-1] :] = NAN
        self.begin = torch.tensor(self.starts, device="cuda").int()
        self.lengths = self.case.sequences.lengths.int()
        tables, device = self.case.sequences.blocks.cpu().numpy(), self.q.device
        contexts, tokens = np.array(chunks).T
        used = sum(-(-context // block) for context, count in chunks if count)
        spec, sms = GqaSpec(*heads, 128, SCALE), torch.cuda.get_device_properties(0).multi_processor_count
        rule = Widening.of(spec, block, used + more, sms)
        self.kernel = WidenedPrefill(spec, rule, device, prefill_scratch(device))
        for each in (self.kernel._copy.k, self.kernel._copy.v):
            assert each is not None
            each.fill_(NAN)
        self.input = CopiedBlocksInput(rule, len(chunks), tables.shape[1], device, 3)
        assert self.input.fill(tables, tokens, np.where(tokens > 0, contexts, 0), 0, copy=True)

    @property
    def plan(self) -> CopiedBlocks:
        return self.input.view(len(self.chunks))

    def run(self, out: torch.Tensor) -> None:
        self.kernel.run(self.q, self.begin, self.case.kv, self.plan, self.lengths, out)

    def check(self, out: torch.Tensor) -> None:
        torch.cuda.synchronize()
        assert bool(out[self.starts[-1] :].isnan().all())
        check_rows(self.case, self.chunks, self.starts, self.heads, self.q, out)


@pytest.mark.parametrize("heads", [GQA, (32, 8), (8, 8), (10, 2), (32, 1)], ids=str)
@pytest.mark.parametrize("block", [8, 16, 128])
def test_fp8_caches_are_widened_first(heads: tuple[int, int], block: int) -> None:
    """A scale per KV head of keys and of values. Again with other codes, in the same scratch memory."""
    widened = Widened(MIXED, heads, block)
    out = torch.full_like(widened.q, NAN)
    widened.run(out)
    widened.check(out)
    for layer in (widened.case.kv.layer.k, widened.case.kv.layer.v):
        assert layer is not None
        layer.copy_((layer.float() * -0.5).to(FP8))  # exact but for the least codes
    for exact in (*widened.case.keys, *widened.case.values):
        exact.mul_(-0.5)
    again = torch.full_like(widened.q, NAN)
    widened.run(again)
    widened.check(again)
    assert not torch.equal(again[: widened.starts[-1]], out[: widened.starts[-1]])


@pytest.mark.parametrize(
    "chunks", [[(9000, 33)], [(3000, 2500), (600, 600)], [(1500, 1), (0, 0), (40, 5)]], ids=str
)
def test_fp8_caches_behind_long_contexts(chunks: list[tuple[int, int]]) -> None:
    widened = Widened(chunks)
    out = torch.full_like(widened.q, NAN)
    widened.run(out)
    widened.check(out)


def test_captured_copies_read_their_blocks_from_memory() -> None:
    """A replay copies what the step before it has sent."""
    widened = Widened([(300, 40), (77, 20)])
    out, table = torch.full_like(widened.q, NAN), widened.case.sequences.blocks.cpu().numpy()
    widened.run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        widened.run(out)
    tokens = np.array([40, 20])
    assert widened.input.fill(table, tokens, np.array([40, 20]), 0, copy=True)
    assert widened.input.fill(table, tokens, np.array([300, 77]), 0, copy=True)
    out.fill_(NAN)
    graph.replay()
    widened.check(out)


@pytest.mark.parametrize(
    ("heads", "dim", "window", "obstacle"),
    [(32, 64, 0, "64 channels"), (30, 128, 0, "30 query heads over 4"), (32, 128, 9, "a window")],
)
def test_an_unsupported_shape_is_refused(heads: int, dim: int, window: int, obstacle: str) -> None:
    case = PagedCase.of([16], Heads(*GQA, 128, 128), 16, BF16)
    with pytest.raises(InternalError, match=obstacle):
        spec = replace(GqaSpec(heads, 4, dim, SCALE), window=window)
        HopperPrefill(case.kv, spec, prefill_scratch(case.kv.layer.k.device))
