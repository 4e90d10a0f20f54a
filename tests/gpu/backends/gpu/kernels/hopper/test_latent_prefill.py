"""Latent attention of chunks on Hopper: expanded keys of 192 channels and values of 128, in torch float64.

The kernel alone on given keys and values, then behind the expansion of a paged cache. Unused memory is NaN.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from ep_server.backends.gpu.attention.expanded import ExpandedPrefill
from ep_server.backends.gpu.chunk_copies import CopiedBlocks, CopiedBlocksInput
from ep_server.backends.gpu.expansion import Expansion
from ep_server.backends.gpu.kernels.hopper.prefill import HopperLatentPrefill, prefill_scratch
from ep_server.backends.gpu.kernels.triton.expand import TILE, ExpandedKv
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, Sequences
from ep_server.backends.gpu.kernels.triton.paged_prefill import prefill
from ep_server.errors import InternalError
from ep_server.models.families.spec import MlaSpec
from tests.support.gpu.latent_prefill_case import LATENT, NOPE, ROPE, SCALE, V_DIM, Case, check, expected
from tests.support.gpu.prefill_case import BF16, MIXED, NAN, Chunks
from tests.support.triton.harness import FP8
from tests.support.triton.paged_case import Heads, PagedCase

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [1, 3, 10, 16])
def test_chunks_of_a_step(heads: int) -> None:
    check(MIXED, heads)


def test_whole_contexts() -> None:
    check(MIXED * 8)


@pytest.mark.parametrize("end", [15, 16, 17, 127, 128, 129, 255, 256, 257, 383, 384, 385, 513])
def test_ends_of_tiles_and_of_the_ring(end: int) -> None:
    check([(end, end), (end + 128, 16), (end + 700, min(end, 33))])


def test_many_chunks() -> None:
    check([(40 + 3 * n, 0 if n % 7 == 3 else 1 + n % 5) for n in range(300)])


def test_more_items_than_multiprocessors() -> None:
    check([(3000, 2500), (600, 600)], 16)


@pytest.mark.parametrize("tokens", [1, 33, 130, 450])
@pytest.mark.parametrize("context", [1500, 9000])
def test_few_tokens_behind_a_long_context(context: int, tokens: int) -> None:
    check([(context, tokens), (0, 0), (40, 5)], 4)


def test_padding_alone() -> None:
    check([(0, 0), (0, 0)])


def test_a_captured_launch_reads_its_arguments_from_memory() -> None:
    case = Case([(300, 40), (77, 20)])
    kernel = HopperLatentPrefill(case.kv, SCALE, prefill_scratch(case.q.device))
    out = torch.zeros(65, 5, V_DIM, device="cuda", dtype=BF16)
    heads = slice(0, case.heads)
    kernel.run(case.q[:, heads], case.begin, case.sequences, out[:, heads])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(case.q[:, heads], case.begin, case.sequences, out[:, heads])
    case.q.copy_(torch.randn(case.q.shape, device="cuda"))
    case.begin.copy_(torch.tensor([0, 33, 50]))
    case.sequences.lengths.copy_(torch.tensor([290, 17]))
    graph.replay()
    again = torch.zeros_like(out)
    kernel.run(case.q[:, heads], case.begin, case.sequences, again[:, heads])
    torch.cuda.synchronize()
    assert torch.equal(out[:50], again[:50]) and bool(out[:50, heads].any(dim=(1, 2)).all())


@pytest.mark.parametrize("wrong", ["k", "v", "rope", "q", "out"])
def test_an_unsupported_shape_is_refused(wrong: str) -> None:
    case = Case([(300, 40)])
    scratch = prefill_scratch(case.q.device)
    given = {"k": case.kv.k, "v": case.kv.v, "rope": case.kv.rope}
    if wrong in given:
        with pytest.raises(InternalError, match=f"expanded {wrong}"):
            HopperLatentPrefill(ExpandedKv(**given | {wrong: given[wrong].float()}), SCALE, scratch)
        return
    q = case.q[:, : case.heads]
    shapes = {"q": q, "out": torch.empty(len(q), case.heads, V_DIM, device="cuda", dtype=BF16)}
    shapes[wrong] = shapes[wrong][..., :96]
    with pytest.raises(InternalError, match=f"{wrong}: "):
        kernel = HopperLatentPrefill(case.kv, SCALE, scratch)
        kernel.run(shapes["q"], case.begin, case.sequences, shapes["out"])


class Latents:
    """Chunks over a paged cache of latents, with room for some more tiles than they have."""

    def __init__(self, chunks: Chunks, heads: int, block: int, dtype: torch.dtype, more: int = 3) -> None:
        self.chunks, self.spec = chunks, MlaSpec(heads, 0, LATENT, NOPE, ROPE, V_DIM, SCALE)
        contexts, tokens = np.array(chunks).T
        shape = Heads(heads, 1, LATENT + ROPE, None, LATENT)
        self.case = PagedCase.of(contexts.tolist(), shape, block, dtype)
        self.starts = [0, *accumulate(tokens.tolist())]
        self.q = torch.randn(self.starts[-1] + 5, heads, NOPE + ROPE, device="cuda").to(BF16)
        self.q[self.starts[-1] :] = NAN
        self.k_up = (torch.randn(heads, NOPE, LATENT, device="cuda") * LATENT**-0.5).to(BF16)
        self.v_up = (torch.randn(heads, LATENT, V_DIM, device="cuda") * LATENT**-0.5).to(BF16)
        self.begin = torch.tensor(self.starts, device="cuda").int()
        self.lengths = self.case.sequences.lengths.int()
        tables, device = self.case.sequences.blocks.cpu().numpy(), self.q.device
        used = sum(-(-context // TILE) for context, count in chunks if count)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        rule = Expansion.of(self.spec, block, used + more, sms)
        self.kernel = ExpandedPrefill(rule, BF16, device, prefill_scratch(device))
        for each in (self.kernel._expanded.k, self.kernel._expanded.v, self.kernel._expanded.rope):
            each.fill_(NAN)
        self.input = CopiedBlocksInput(rule, len(chunks), tables.shape[1], device, 3)
        assert self.input.fill(tables, tokens, np.where(tokens > 0, contexts, 0), 0, copy=True)
        torch.cuda.synchronize()

    @property
    def plan(self) -> CopiedBlocks:
        return self.input.view(len(self.chunks))

    def run(self, out: torch.Tensor) -> None:
        up = self.k_up, self.v_up
        self.kernel.run(self.q, self.begin, self.case.kv, up, self.plan, self.lengths, out)

    def check(self, out: torch.Tensor) -> None:
        torch.cuda.synchronize()
        assert bool(out[self.starts[-1] :].isnan().all())
        for s, ((begin, end), (context, tokens)) in enumerate(
            zip(pairwise(self.starts), self.chunks, strict=True)
        ):
            if tokens == 0:
                continue
            rows = self.case.keys[s][:, 0].double().cuda()
            keys = torch.einsum("pl,hnl->phn", rows[:, :LATENT], self.k_up.double())
            values = torch.einsum("pl,hlv->phv", rows[:, :LATENT], self.v_up.double())
            shared = rows[:, None, LATENT:].expand(context, self.spec.heads, ROPE)
            wanted = expected(self.q[begin:end].double(), torch.cat([keys, shared], 2), values, context)
            error = (out[begin:end].double() - wanted).abs().amax() / wanted.abs().amax()
            assert error < 0.015, (s, context, tokens, float(error))

    def absorbed(self) -> torch.Tensor:
        """By Triton's kernel over the latents."""
        query = torch.empty(len(self.q), self.spec.heads, LATENT + ROPE, device="cuda", dtype=BF16)
        query[..., :LATENT] = torch.einsum("thn,hnl->thl", self.q[..., :NOPE], self.k_up)
        query[..., LATENT:] = self.q[..., NOPE:]
        latents = torch.full((*self.q.shape[:2], LATENT), NAN, device="cuda", dtype=BF16)
        sequences = Sequences(self.case.sequences.blocks.int(), self.lengths)
        prefill(query, self.begin, self.case.kv, sequences, AttentionRule(SCALE), latents)
        return torch.einsum("thl,hlv->thv", latents, self.v_up)

    def empty(self) -> torch.Tensor:
        return torch.full((*self.q.shape[:2], V_DIM), NAN, device="cuda", dtype=BF16)


@pytest.mark.parametrize("heads", [4, 16, 40, 128])  # in one go, one, four and eight
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_latents_are_expanded_first(heads: int, dtype: torch.dtype) -> None:
    """Again with other latents, in the same scratch memory. With codes, their scale is applied."""
    latents = Latents(MIXED, heads, 16, dtype)
    out = latents.empty()
    latents.run(out)
    latents.check(out)
    layer = latents.case.kv.layer.k
    layer.copy_((layer.float() * -0.5).to(dtype))  # exact but for the least codes
    for exact in latents.case.keys:
        exact.mul_(-0.5)
    again = latents.empty()
    latents.run(again)
    latents.check(again)


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_blocks_of_each_size(block: int) -> None:
    latents = Latents([(1000, 100), (77, 50), (300, 300), (257, 1)], 16, block, BF16)
    out = latents.empty()
    latents.run(out)
    latents.check(out)


@pytest.mark.parametrize("chunks", [[(9000, 33)], [(3000, 2500), (600, 600)], MIXED], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_the_result_is_that_of_the_absorbed_form(chunks: Chunks, dtype: torch.dtype) -> None:
    latents = Latents(chunks, 16, 16, dtype)
    out, used = latents.empty(), latents.starts[-1]
    latents.run(out)
    absorbed = latents.absorbed()[:used].float()
    error = (out[:used].float() - absorbed).norm() / absorbed.norm()
    assert error < 0.02, float(error)


def test_captured_expansions_read_their_blocks_from_memory() -> None:
    """A replay expands what the step before it has sent."""
    latents = Latents([(300, 40), (77, 20)], 32, 16, BF16)
    out, table = latents.empty(), latents.case.sequences.blocks.cpu().numpy()
    latents.run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        latents.run(out)
    tokens = np.array([40, 20])
    assert latents.input.fill(table, tokens, np.array([40, 20]), 0, copy=True)
    assert latents.input.fill(table, tokens, np.array([300, 77]), 0, copy=True)
    out.fill_(NAN)
    graph.replay()
    latents.check(out)
