"""One step of prompt tokens of a shape on one GPU: its rate, and kernel by kernel.

    python3 benchmarks/gpu_prefill.py qwen3-30b-a3b --tokens 2048,8192 --past 0,4096 --layers 4 [--profile]
    python3 benchmarks/gpu_prefill.py --attention --tokens 33,256,8192 --past 0,4096,24576

Random weights, experts drawn uniformly, one rank in this process. A step is a chunk of one prompt with `past`
tokens before it in the cache. With fewer layers than the model has, the time of the whole model is what one
layer adds, times its layers, plus the rest. The plain product of 8192 x 8192 x 8192 in the same run is the
bound that TFLOP/s are printed beside. --kv-dtype: of the cache. --attention: of one layer alone, with caches
in bfloat16 and FP8, for one chunk and for several; results are compared first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_step import SHAPES, built, profiled, shortened
from gpu_timing import BF16, arguments, median_us, numbers

from ep_server.backends.gpu.attention.widened import WidenedPrefill
from ep_server.backends.gpu.chunk_copies import CopiedBlocksInput
from ep_server.backends.gpu.kernels.hopper.prefill import HopperPrefill, prefill_scratch
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_prefill import prefill
from ep_server.backends.gpu.kernels.triton.widen import widen_blocks
from ep_server.backends.gpu.widening import Widening
from ep_server.models.families import read_spec
from ep_server.models.families.spec import GqaSpec, ModelSpec
from ep_server.models.kv_cache import KvLayer
from ep_server.ranks.build import RankParts
from ep_server.records import Request, Sampling, SeqSlice, StepBatch, Stopping

BLOCK = 16  # positions


def chunk(tokens: int, past: int) -> StepBatch:
    """The tokens behind `past` others of request 1; the last one draws."""
    held = -(-(past + tokens) // BLOCK)
    ids = tuple(n % 1000 for n in range(tokens))
    return StepBatch((SeqSlice(1, past, ids, tuple(range(held)), True),), tokens)


def layer_flops(spec: ModelSpec, tokens: int, past: int) -> float:
    """Operations of the products of one sparse layer: projections, attention, experts."""
    attention, router = spec.attention, spec.router
    assert isinstance(attention, GqaSpec) and router is not None
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    dense = tokens * spec.hidden * (2 * q + 2 * kv)
    pairs = tokens * past + tokens * (tokens + 1) / 2
    experts = tokens * router.top_k * 3 * spec.hidden * spec.expert_ffn
    return 2.0 * (dense + 2 * pairs * q + experts)


def product_tflops() -> float:
    """Of a plain product in bfloat16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    return 2 * 8192**3 / median_us(lambda: a @ b) / 1e6


def steps(parts: RankParts, given: argparse.Namespace, *, explore: bool) -> dict[tuple[int, int], float]:
    """us of each (tokens, past)."""
    runner: Any = parts.runner
    found = {}
    longest = max(given.tokens) + max(given.past)
    runner.add(Request("r1", 1, (0,) * longest, Sampling(temperature=0.0), Stopping(1 << 20)))
    with torch.inference_mode():
        for tokens in given.tokens:
            for past in given.past:
                batch = chunk(tokens, past)
                found[tokens, past] = median_us(lambda batch=batch: runner.collect(runner.launch(batch)))
                print(f"  {tokens} tokens behind {past}: {found[tokens, past] / 1e3:.2f} ms", flush=True)
                if explore and given.profile and (tokens, past) == (max(given.tokens), max(given.past)):
                    profiled(lambda batch=batch: runner.collect(runner.launch(batch)), tokens)
    runner.remove(1)
    return found


def attention(spec: GqaSpec, tokens: int, past: int, chunks: int) -> None:
    """us of a layer's attention with equal chunks that share no block: each cache and kernel."""
    device, context = torch.device("cuda", 0), tokens + past
    held = -(-context // BLOCK)
    shape = (chunks * held, BLOCK, spec.kv_heads, spec.head_dim)
    scale = torch.linspace(0.5, 2.0, spec.kv_heads, device=device)
    k, v = (torch.randn(shape, device=device, dtype=BF16).to(torch.float8_e4m3fn) for _ in "kv")
    codes = PagedKv(KvLayer(k, v, spec.head_dim), scale, scale)
    values = PagedKv(KvLayer(*((x.float() * scale[:, None]).to(BF16) for x in (k, v)), spec.head_dim))
    tables = torch.randperm(chunks * held, device=device).int().view(chunks, held)
    sequences = Sequences(tables, torch.full((chunks,), context, dtype=torch.int32, device=device))
    starts = torch.arange(chunks + 1, device=device, dtype=torch.int32) * tokens
    q = torch.randn(chunks * tokens, spec.heads, spec.head_dim, device=device, dtype=BF16)
    sms, scratch = torch.cuda.get_device_properties(device).multi_processor_count, prefill_scratch(device)
    rule = Widening.of(spec, BLOCK, chunks * held, sms)
    if rule.blocks < chunks * held:
        print(f"{chunks} x {tokens} behind {past}: no room for a copy", flush=True)
        return
    given = CopiedBlocksInput(rule, chunks, held, device, 1)
    counts, contexts = np.full(chunks, tokens), np.full(chunks, context)
    given.fill(tables.cpu().numpy(), counts, contexts, 0, copy=True)
    hopper, wide = HopperPrefill(values, spec, scratch), WidenedPrefill(spec, rule, device, scratch)
    plan, triton = given.view(chunks), AttentionRule(spec.scale)
    copy = KvLayer(*(torch.empty(shape, dtype=BF16, device=device) for _ in "kv"), spec.head_dim)
    work = {
        "BF16 hopper": lambda out: hopper.run(q, starts, sequences, out),
        "FP8 triton": lambda out: prefill(q, starts, codes, sequences, triton, out),
        "FP8 hopper": lambda out: wide.run(q, starts, codes, plan, sequences.lengths, out),
    }
    outs = {name: torch.full_like(q, float("nan")) for name in work}
    for name, run in work.items():
        run(outs[name])
    wanted = outs["FP8 triton"].float()
    for name, out in outs.items():
        error = float((out.float() - wanted).norm() / wanted.norm())
        assert error < 0.02, f"{name}: {error}"  # also false for NaN
    times = {name: median_us(lambda run=run, out=outs[name]: run(out)) for name, run in work.items()}
    times["copy alone"] = median_us(lambda: widen_blocks(codes, plan.blocks, plan.count, copy, 8 * sms))
    pairs = chunks * (tokens * past + tokens * (tokens + 1) / 2)
    flops = 4.0 * pairs * spec.heads * spec.head_dim
    shown = ", ".join(f"{name} {time:.0f}" for name, time in times.items())
    moved = chunks * held * rule.block_bytes * 1.5 / times["copy alone"] / 1e6
    chosen = "hopper" if rule.pays(counts, contexts, chunks * held) else "triton"
    print(
        f"{chunks} x {tokens} behind {past}: us {shown} ({moved:.2f} TB/s); TFLOP/s FP8 hopper"
        f" {flops / times['FP8 hopper'] / 1e6:.0f}, triton {flops / times['FP8 triton'] / 1e6:.0f};"
        f" the rule takes {chosen}",
        flush=True,
    )


def main() -> None:
    """Builds two ranks that differ in layers, and prints what the whole model takes."""
    parser = arguments(__doc__, tokens="2048,8192", past="0,4096")
    parser.add_argument("shape", nargs="?", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--chunks", default=[1], type=numbers, help="with --attention: how many at a time")
    given = parser.parse_args()
    if given.attention:
        spec = read_spec(str(SHAPES / given.shape)).attention
        assert isinstance(spec, GqaSpec)
        print(torch.cuda.get_device_name(), torch.__version__, given.shape)
        for chunks, tokens, past in itertools.product(given.chunks, given.tokens, given.past):
            attention(spec, tokens, past, chunks)
        return
    whole = json.loads((SHAPES / given.shape / "config.json").read_text())["num_hidden_layers"]
    spec, plain = read_spec(str(SHAPES / given.shape)), product_tflops()
    print(torch.cuda.get_device_name(), torch.__version__, given.shape, f"plain product {plain:.0f} TFLOP/s")
    counts = [given.layers // 2, given.layers]
    found = []
    for layers in counts:
        print(f"{layers} layers", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            longest, most = max(given.tokens) + max(given.past), max(given.tokens)
            path: Path = shortened(given.shape, layers, folder, longest + 64)
            parts = built(path, [1], longest, given.routing, most=most, kv_dtype=given.kv_dtype)
            found.append(steps(parts, given, explore=layers == counts[-1]))
            parts.exchange.close()
        del parts
        torch.cuda.empty_cache()
    for case, time in found[-1].items():
        layer = (time - found[0][case]) / (counts[1] - counts[0])
        step = time + layer * (whole - counts[1])
        rate = layer_flops(spec, *case) / layer / 1e6
        print(
            f"{case[0]} tokens behind {case[1]}: layer {layer:.0f} us, {rate:.0f} TFLOP/s,"
            f" {rate / plain:.0%} of a plain product; step {step / 1e3:.1f} ms,"
            f" {case[0] / step * 1e6:.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
