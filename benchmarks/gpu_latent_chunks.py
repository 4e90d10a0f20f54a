"""Latent attention of one layer with prompt chunks on one GPU: absorbed by Triton's kernel, and expanded.

    python3 benchmarks/gpu_latent_chunks.py [--heads 16,128] [--tokens 33,256,2048] [--past 0,4096] [--fp8]
    python3 benchmarks/gpu_latent_chunks.py --tokens 16,32,48,64,96,128 --past 8192 --chunks 8

Both from queries of 192 channels to results of 128, each in a graph, compared first. Times in microseconds
of a layer, median of replays. Absorbed: products of queries and of results with the up-projections around
Triton's kernel. Expanded: the latents to keys and values, some heads at a time, and the Hopper kernel.
TFLOP/s of each part are of its own products: 2,176 FLOP for a pair of query and position of a head, or 640.
--chunks: how many equal ones a step has, which share no block. The rule that chooses assumes such rates; the
last words say whether it is right here.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import numpy as np
import torch
from gpu_timing import BF16, arguments, captured, time_us

from ep_server.backends.gpu.attention.expanded import ExpandedPrefill
from ep_server.backends.gpu.chunk_copies import CopiedBlocksInput
from ep_server.backends.gpu.expansion import Expansion
from ep_server.backends.gpu.kernels.hopper.prefill import HopperLatentPrefill, prefill_scratch
from ep_server.backends.gpu.kernels.triton.expand import TILE, ExpandedKv, expand_blocks
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_prefill import prefill
from ep_server.models.families.spec import MlaSpec
from ep_server.models.kv_cache import KvLayer

LATENT, NOPE, ROPE, V_DIM, BLOCK = 512, 128, 64, 128, 16
MANY, FEW, LONG = 30, 5, 2e4  # replays; us
PRODUCT = 8192


class Case:
    """Equal chunks behind others, whose blocks are in no order."""

    def __init__(self, heads: int, chunks: int, tokens: int, past: int, dtype: torch.dtype) -> None:
        device, context = torch.device("cuda", 0), tokens + past
        held = -(-context // BLOCK)
        self.spec = MlaSpec(heads, 0, LATENT, NOPE, ROPE, V_DIM, (NOPE + ROPE) ** -0.5)
        scale = torch.tensor([0.5], device=device) if dtype is not BF16 else None
        rows = torch.randn(chunks * held, BLOCK, 1, LATENT + ROPE, device=device, dtype=BF16)
        self.kv = PagedKv(KvLayer(rows.to(dtype), None, LATENT), scale)
        tables = torch.randperm(chunks * held, device=device).int().view(chunks, held)
        lengths = torch.full((chunks,), context, dtype=torch.int32, device=device)
        self.sequences = Sequences(tables, lengths)
        self.starts = torch.arange(chunks + 1, device=device, dtype=torch.int32) * tokens
        self.k_up, self.v_up = (
            torch.randn(heads, *shape, device=device, dtype=BF16) * LATENT**-0.5
            for shape in ((NOPE, LATENT), (LATENT, V_DIM))
        )
        count = chunks * tokens
        self.q = torch.randn(count, heads, NOPE + ROPE, device=device, dtype=BF16)
        self.query = torch.empty(count, heads, LATENT + ROPE, device=device, dtype=BF16)
        self.query[..., LATENT:] = self.q[..., NOPE:]
        self.latents = torch.empty(count, heads, LATENT, device=device, dtype=BF16)
        self.pairs = heads * chunks * (tokens * past + tokens * (tokens + 1) / 2)
        self.tiles = chunks * -(-context // TILE)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.rule = Expansion.of(self.spec, BLOCK, self.tiles, sms)
        self.counts, self.contexts = np.full(chunks, tokens), np.full(chunks, context)
        self.fits = self.rule.blocks == self.tiles
        if not self.fits:
            return
        given = CopiedBlocksInput(self.rule, chunks, held, device, 1)
        given.fill(tables.cpu().numpy(), self.counts, self.contexts, 0, copy=True)
        self.plan, scratch = given.view(chunks), prefill_scratch(device)
        self.whole = ExpandedPrefill(self.rule, BF16, device, scratch)
        positions = self.tiles * TILE
        shapes = (self.rule.heads, positions, NOPE), (self.rule.heads, positions, V_DIM), (positions, ROPE)
        self.room = ExpandedKv(*(torch.zeros(shape, device=device, dtype=BF16) for shape in shapes))
        self.kernel = HopperLatentPrefill(self.room, self.spec.scale, scratch)

    def absorb(self) -> None:
        by_head = self.query[..., :LATENT].transpose(0, 1)
        torch.bmm(self.q[..., :NOPE].transpose(0, 1), self.k_up, out=by_head)

    def attend(self) -> None:
        rule = AttentionRule(self.spec.scale)
        prefill(self.query, self.starts, self.kv, self.sequences, rule, self.latents)

    def absorbed(self, out: torch.Tensor) -> None:
        self.absorb()
        self.attend()
        torch.bmm(self.latents.transpose(0, 1), self.v_up, out=out.transpose(0, 1))

    def expanded(self, out: torch.Tensor) -> None:
        up, lengths = (self.k_up, self.v_up), self.sequences.lengths
        self.whole.run(self.q, self.starts, self.kv, up, self.plan, lengths, out)

    def expand_all(self) -> None:
        for some in self.parts():
            up, programs = (self.k_up[some], self.v_up[some]), self.rule.num_sms
            expand_blocks(self.kv, self.plan.blocks, self.plan.count, *up, self.room, programs)

    def attend_all(self, out: torch.Tensor) -> None:
        """Of all heads, to those expanded last: as fast, but wrong."""
        sequences = Sequences(self.plan.tables, self.sequences.lengths)
        for some in self.parts():
            self.kernel.run(self.q[:, some], self.starts, sequences, out[:, some])

    def parts(self) -> list[slice]:
        """Heads of each launch."""
        each = self.rule.heads
        return [slice(first, first + each) for first in range(0, self.spec.heads, each)]


def timed(work: Callable[[], object]) -> float:
    """us in a graph."""
    graph = captured(lambda _: work(), 1)
    once = time_us(graph.replay)
    return statistics.median(time_us(graph.replay) for _ in range(MANY if once < LONG else FEW))


def compare(case: Case, name: str) -> None:
    if not case.fits:
        print(f"{name}: no room to expand {case.tiles} tiles", flush=True)
        return
    shape = (*case.q.shape[:2], V_DIM)
    outs = [torch.full(shape, float("nan"), device="cuda", dtype=BF16) for _ in range(2)]
    case.absorbed(outs[0])
    case.expanded(outs[1])
    wanted = outs[0].float()
    error = float((outs[1].float() - wanted).norm() / wanted.norm())
    assert error < 0.02, f"{name}: {error}"  # also false for NaN
    absorbed, expanded = timed(lambda: case.absorbed(outs[0])), timed(lambda: case.expanded(outs[1]))
    absorb, triton = timed(case.absorb), timed(case.attend)
    expand, hopper = timed(case.expand_all), timed(lambda: case.attend_all(outs[1]))
    up = 2.0 * LATENT * case.spec.heads  # FLOP for a channel
    rates = {
        "triton": 2 * case.pairs * (2 * LATENT + ROPE) / triton,
        "products": len(case.q) * up * NOPE / absorb,
        "hopper": 2 * case.pairs * (NOPE + ROPE + V_DIM) / hopper,
        "expansion": case.tiles * TILE * up * (NOPE + V_DIM) / expand,
    }
    pays = case.rule.pays(case.counts, case.contexts, case.tiles)
    shown = ", ".join(f"{part} {rate / 1e6:.0f}" for part, rate in rates.items())
    print(
        f"{name}: us absorbed {absorbed:.0f} (kernel {triton:.0f}), expanded {expanded:.0f} (kernel"
        f" {hopper:.0f}, expansion {expand:.0f}); TFLOP/s {shown}; the rule takes"
        f" {'expanded' if pays else 'absorbed'}{'' if pays == (expanded < absorbed) else ', WRONG'}",
        flush=True,
    )


def main() -> None:
    parser = arguments(__doc__, heads="16,128", tokens="33,256,2048,8192", past="0,4096,24576", chunks="1")
    parser.add_argument("--fp8", action="store_true", help="a cache of codes")
    given = parser.parse_args()
    a, b = (torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=BF16) for _ in range(2))
    plain = 2 * PRODUCT**3 / timed(lambda: a @ b) / 1e6
    print(torch.cuda.get_device_name(), torch.__version__, f"plain product {plain:.0f} TFLOP/s")
    dtype = torch.float8_e4m3fn if given.fp8 else BF16
    for heads, chunks, past, tokens in itertools.product(given.heads, given.chunks, given.past, given.tokens):
        name = f"{heads} heads, {chunks} x {tokens} behind {past}"
        compare(Case(heads, chunks, tokens, past, dtype), name)


if __name__ == "__main__":
    main()
