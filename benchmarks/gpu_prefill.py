"""One step of prompt tokens of a shape on one GPU: its rate, and kernel by kernel.

    python3 benchmarks/gpu_prefill.py qwen3-30b-a3b --tokens 2048,8192 --past 0,4096 --layers 4 [--profile]

Random weights, experts drawn uniformly, one rank in this process. A step is a chunk of one prompt with `past`
tokens before it in the cache. With fewer layers than the model has, the time of the whole model is what one
layer adds, times its layers, plus the rest. The plain product of 8192 x 8192 x 8192 in the same run is the
bound that TFLOP/s are printed beside. --kv-dtype: of the cache.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_step import SHAPES, built, profiled, shortened
from gpu_timing import BF16, arguments, median_us

from ep_server.models.families import read_spec
from ep_server.models.families.spec import GqaSpec, ModelSpec
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


def main() -> None:
    """Builds two ranks that differ in layers, and prints what the whole model takes."""
    parser = arguments(__doc__, tokens="2048,8192", past="0,4096")
    parser.add_argument("shape", nargs="?", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--kv-dtype", default="auto")
    given = parser.parse_args()
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
