"""Attention of prompt chunks over a paged cache, one layer on one Hopper GPU: our kernel and others.

    python3 benchmarks/gpu_chunk_attention.py --tokens 33,256,8192 --past 0,4096,24576 [--chunks 1,4] [--fp8]

Chunks are equal and share no block. Others run where they can be imported: FlashInfer's FA3 back end, which
`gpu_check bring` compiles; FlashAttention-3 as vLLM packs it, of its wheel; cuDNN, dense, for one chunk with
nothing before it. Each result is compared with Triton's first. Times are medians of graphs that are replayed
in turn; TFLOP/s count the products below the diagonal. --fp8: caches in FP8 instead, which ours copies to
bfloat16 first (ep_server/backends/gpu/widening.py) and others do not read beside queries in bfloat16.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_step import SHAPES
from gpu_timing import BF16, REPLAYS, arguments, captured, numbers, time_us
from torch.nn.attention import SDPBackend, sdpa_kernel

from ep_server.backends.gpu.attention.widened import WidenedPrefill
from ep_server.backends.gpu.chunk_copies import CopiedBlocksInput
from ep_server.backends.gpu.kernels.hopper.prefill import HopperPrefill, prefill_scratch
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_prefill import prefill
from ep_server.backends.gpu.kernels.triton.widen import widen_blocks
from ep_server.backends.gpu.widening import Widening
from ep_server.models.families import read_spec
from ep_server.models.families.spec import GqaSpec
from ep_server.models.kv_cache import KvLayer

BLOCK = 16  # positions
WARM_UPS, ROUNDS = 3, 4  # rounds: of a graph
DEVICE = torch.device("cuda", 0)
Run = Callable[[torch.Tensor], object]  # writes the output given


class NotForThisCase(Exception):
    """A kernel cannot do it."""


class Chunks:
    """Equal chunks, each behind as many tokens, and the blocks of their caches in no order."""

    def __init__(self, spec: GqaSpec, chunks: int, tokens: int, past: int) -> None:
        self.spec, self.chunks, self.tokens, self.past = spec, chunks, tokens, past
        self.context = tokens + past
        self.held = -(-self.context // BLOCK)  # blocks of a chunk
        self.tables = torch.randperm(chunks * self.held, device=DEVICE).int().view(chunks, self.held)
        lengths = torch.full((chunks,), self.context, dtype=torch.int32, device=DEVICE)
        self.sequences = Sequences(self.tables, lengths)
        self.starts = torch.arange(chunks + 1, device=DEVICE, dtype=torch.int32) * tokens
        self.q = torch.randn(chunks * tokens, spec.heads, spec.head_dim, device=DEVICE, dtype=BF16)

    @property
    def cache_shape(self) -> tuple[int, ...]:
        return self.chunks * self.held, BLOCK, self.spec.kv_heads, self.spec.head_dim

    @property
    def flops(self) -> float:
        """Below the diagonal."""
        pairs = self.chunks * (self.tokens * self.past + self.tokens * (self.tokens + 1) / 2)
        return 4.0 * pairs * self.spec.heads * self.spec.head_dim

    def __str__(self) -> str:
        return f"{self.chunks} x {self.tokens} behind {self.past}"


def flashinfer_fa3(case: Chunks, kv: KvLayer) -> Run:
    """FlashInfer's FA3 back end; its plan, made on the host once per step, is not timed."""
    flashinfer = importlib.import_module("flashinfer")
    space = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa3")
    last = torch.full((case.chunks,), (case.context - 1) % BLOCK + 1, dtype=torch.int32, device=DEVICE)
    first = torch.arange(case.chunks + 1, device=DEVICE, dtype=torch.int32) * case.held
    spec = case.spec
    wrapper.plan(
        case.starts,
        first,
        case.tables.flatten(),
        last,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        BLOCK,
        causal=True,
        sm_scale=spec.scale,
        q_data_type=BF16,
        kv_data_type=BF16,
    )
    return lambda out: wrapper.run(case.q, (kv.k, kv.v), out=out)


def vllm_fa3(case: Chunks, kv: KvLayer) -> Run:
    """FlashAttention-3 as vLLM calls it."""
    attend: Any = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    lengths, spec = case.sequences.lengths, case.spec
    return lambda out: attend(
        case.q,
        kv.k,
        kv.v,
        case.tokens,
        case.starts,
        case.context,
        seqused_k=lengths,
        softmax_scale=spec.scale,
        causal=True,
        block_table=case.tables,
        out=out,
        fa_version=3,
    )


def cudnn(case: Chunks, kv: KvLayer) -> Run:
    """Dense, not paged: keys and values are copied together before. Raises: NotForThisCase."""
    if case.past or case.chunks > 1 or case.tokens == 1:
        raise NotForThisCase
    k, v = (
        x[case.tables[0].long()].flatten(0, 1)[: case.context].transpose(0, 1)[None] for x in (kv.k, kv.v)
    )
    q, scale = case.q.transpose(0, 1)[None], case.spec.scale

    def run(out: torch.Tensor) -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        if not torch.cuda.is_current_stream_capturing():  # the copy is for the comparison
            out.copy_(found[0].transpose(0, 1))

    return run


OTHERS = {"FlashInfer FA3": flashinfer_fa3, "vLLM FA3": vllm_fa3, "cuDNN dense": cudnn}


def checked(case: Chunks, work: dict[str, Run], against: str) -> None:
    """Raises: AssertionError if a result differs from that of `against`."""
    outs = {name: torch.full_like(case.q, float("nan")) for name in work}
    for name, run in work.items():
        run(outs[name])
    wanted = outs[against].float()
    for name, out in outs.items():
        error = float((out.float() - wanted).norm() / wanted.norm())
        assert error < 0.02, f"{case}: {name}: {error}"  # also false for NaN


def timed(case: Chunks, work: dict[str, Run]) -> dict[str, float]:
    """us of each, medians of replays in turn."""
    out = torch.empty_like(case.q)
    graphs = {name: captured(lambda _, run=run: run(out), 1, ROUNDS) for name, run in work.items()}
    times: dict[str, list[float]] = {name: [] for name in work}
    for replay in range(WARM_UPS + REPLAYS):
        for name, graph in graphs.items():
            one = time_us(graph.replay) / ROUNDS
            if replay >= WARM_UPS:
                times[name].append(one)
    return {name: float(np.median(all_of_it)) for name, all_of_it in times.items()}


def bf16(case: Chunks) -> None:
    """Prints one line: ours, Triton's, and the others that can run."""
    k, v = (torch.randn(case.cache_shape, device=DEVICE, dtype=BF16) for _ in "kv")
    kv = KvLayer(k, v, case.spec.head_dim)
    paged, rule = PagedKv(kv), AttentionRule(case.spec.scale)
    hopper = HopperPrefill(paged, case.spec, prefill_scratch(DEVICE))
    work: dict[str, Run] = {
        "ours": lambda out: hopper.run(case.q, case.starts, case.sequences, out),
        "Triton": lambda out: prefill(case.q, case.starts, paged, case.sequences, rule, out),
    }
    absent = []
    for name, other in OTHERS.items():
        try:
            work[name] = other(case, kv)
        except ImportError as error:
            absent.append(f"{name}: {error}")
        except NotForThisCase:
            continue
    checked(case, work, "Triton")
    times = timed(case, work)
    shown = ", ".join(f"{name} {us:.1f} ({case.flops / us / 1e6:.0f})" for name, us in times.items())
    print(f"{case}: us (TFLOP/s) {shown}" + "".join(f"; no {one}" for one in absent), flush=True)


def fp8(case: Chunks) -> None:
    """Prints one line: ours behind a copy to bfloat16, Triton's, and what the rule takes."""
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    blocks, spec = case.chunks * case.held, case.spec
    rule = Widening.of(spec, BLOCK, blocks, sms)
    if rule.blocks < blocks:
        print(f"{case}: no room for a copy", flush=True)
        return
    scale = torch.linspace(0.5, 2.0, spec.kv_heads, device=DEVICE)
    k, v = (torch.randn(case.cache_shape, device=DEVICE, dtype=BF16).to(torch.float8_e4m3fn) for _ in "kv")
    codes = PagedKv(KvLayer(k, v, spec.head_dim), scale, scale)
    given = CopiedBlocksInput(rule, case.chunks, case.held, DEVICE, 1)
    counts, contexts = np.full(case.chunks, case.tokens), np.full(case.chunks, case.context)
    given.fill(case.tables.cpu().numpy(), counts, contexts, 0, copy=True)
    wide, plan = WidenedPrefill(spec, rule, DEVICE, prefill_scratch(DEVICE)), given.view(case.chunks)
    lengths, triton = case.sequences.lengths, AttentionRule(spec.scale)
    work: dict[str, Run] = {
        "ours": lambda out: wide.run(case.q, case.starts, codes, plan, lengths, out),
        "Triton": lambda out: prefill(case.q, case.starts, codes, case.sequences, triton, out),
    }
    checked(case, work, "Triton")
    copy = KvLayer(*(torch.empty(case.cache_shape, dtype=BF16, device=DEVICE) for _ in "kv"), spec.head_dim)
    work["copy alone"] = lambda out: widen_blocks(codes, plan.blocks, plan.count, copy, 8 * sms)
    times = timed(case, work)
    shown = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
    rates = ", ".join(f"{name} {case.flops / times[name] / 1e6:.0f}" for name in ("ours", "Triton"))
    moved = blocks * rule.block_bytes * 1.5 / times["copy alone"] / 1e6
    chosen = "ours" if rule.pays(counts, contexts, blocks) else "Triton"
    print(f"{case}: us {shown} ({moved:.2f} TB/s); TFLOP/s {rates}; the rule takes {chosen}", flush=True)


def main() -> None:
    parser = arguments(__doc__, tokens="33,256,2048,8192", past="0,4096,24576")
    parser.add_argument("shape", nargs="?", default="qwen3-30b-a3b", help="of benchmarks/shapes")
    parser.add_argument("--chunks", default=[1], type=numbers, help="at a time")
    parser.add_argument("--fp8", action="store_true")
    given = parser.parse_args()
    spec = read_spec(str(SHAPES / given.shape)).attention
    assert isinstance(spec, GqaSpec)
    print(torch.cuda.get_device_name(), torch.__version__, given.shape)
    for chunks, tokens, past in itertools.product(given.chunks, given.tokens, given.past):
        (fp8 if given.fp8 else bf16)(Chunks(spec, chunks, tokens, past))


if __name__ == "__main__":
    main()
