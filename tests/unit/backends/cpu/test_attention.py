"""Both implementations of attention against loops over tokens, in a cache whose unused memory is NaN."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest
import torch

from ep_server.backends.cpu.native_compute import NativeCompute
from ep_server.backends.torch_compute import TorchCompute
from ep_server.models.batch import AttentionMeta, split
from ep_server.models.compute import Compute
from ep_server.models.families.spec import GqaSpec, MlaSpec, ModelSpec, RopeSpec, RouterSpec
from ep_server.models.kv_cache import KvCache, KvLayer
from ep_server.models.sizes import Dtype, kv_block_bytes
from ep_server.records import SeqSlice, StepBatch
from tests.support.compare import assert_close

BLOCKS, BLOCK = 64, 4


def naive(q: torch.Tensor, kv: KvLayer, meta: AttentionMeta, scale: float, window: int) -> torch.Tensor:
    heads, group = q.shape[1], q.shape[1] // kv.k.shape[2]
    out = torch.zeros(len(q), heads, kv.v_dim, dtype=torch.float64)
    for i in range(len(meta.context)):
        for row in range(meta.query_start[i], meta.query_start[i + 1]):
            position = int(meta.positions[row])
            first = max(0, position - window + 1) if window else 0
            for head in range(heads):
                scores, values = [], []
                for p in range(first, position + 1):
                    block, offset = int(meta.blocks[i, p // BLOCK]), p % BLOCK
                    key = kv.k[block, offset, head // group].double()
                    value = key if kv.v is None else kv.v[block, offset, head // group].double()
                    scores.append(float(q[row, head].double() @ key) * scale)
                    values.append(value[: kv.v_dim])
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                total = sum(w * v for w, v in zip(weights, values, strict=True))
                out[row, head] = total / sum(weights)
    return out


BATCHES = {
    "one-decode": [(0, 1)],
    "decode": [(0, 1), (17, 1), (7, 1)],
    "equal-decode": [(9, 1), (9, 1)],
    "prefill": [(0, 9)],
    "chunk": [(11, 5)],
    "mixed": [(3, 1), (0, 6), (8, 3), (30, 1), (13, 2)],
}


@pytest.mark.parametrize("compute", [TorchCompute(), NativeCompute()], ids=("torch", "native"))
@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("kind", ["gqa", "mha", "latent"])
@pytest.mark.parametrize("name", BATCHES)
def test_against_loops(name: str, kind: str, window: int, compute: Compute) -> None:
    torch.manual_seed(1)
    kv_heads, heads, k_dim, v_dim = {"gqa": (2, 6, 8, 8), "mha": (3, 3, 8, 8), "latent": (1, 4, 10, 6)}[kind]
    shuffled = random.Random(2).sample(range(BLOCKS), BLOCKS)
    slices = [
        SeqSlice(i, start, [0] * n, [shuffled.pop() for _ in range(-(-(start + n) // BLOCK))], True)
        for i, (start, n) in enumerate(BATCHES[name])
    ]
    meta = split(StepBatch(tuple(slices), sum(n for _, n in BATCHES[name])), 1, BLOCK)[0].attention
    k = torch.full((BLOCKS, BLOCK, kv_heads, k_dim), float("nan"))
    kv = KvLayer(k, None if kind == "latent" else torch.full_like(k[..., :v_dim], float("nan")), v_dim)
    for i, context in enumerate(meta.context):
        positions = torch.arange(context)
        slots = meta.blocks[i, positions // BLOCK] * BLOCK + positions % BLOCK
        kv.write(slots, torch.randn(context, kv_heads, k_dim), torch.randn(context, kv_heads, v_dim))
    q = torch.randn(len(meta.positions), heads, k_dim)
    out = compute.attend(meta, window, q.dtype)(q, kv, 0.3)
    assert out.shape == (len(q), heads, v_dim)
    assert_close(out, naive(q, kv, meta, 0.3, window), f"{name} {kind}", abs_tol=2e-6)


@pytest.mark.parametrize(
    ("attention", "per_token"),
    [(GqaSpec(8, 2, 16, 0.25), 2 * 2 * 16), (MlaSpec(4, 0, 24, 16, 8, 12, 0.2), 24 + 8)],
)
def test_the_cache_takes_what_it_says(attention: GqaSpec | MlaSpec, per_token: int) -> None:
    spec = ModelSpec(
        "x", 8, 8, 64, 1e-6, False, attention, RopeSpec(8, 1e4), RouterSpec(2, 1), (True,) * 3, 8
    )
    cache = KvCache(spec, 10, BLOCK, torch.bfloat16)
    assert len(cache.layers) == 3
    assert cache.nbytes == 10 * kv_block_bytes(spec, BLOCK, Dtype.BFLOAT16) == 10 * BLOCK * 3 * per_token * 2
    assert spec.kv_values_per_token == 3 * per_token


def committed() -> int:
    """Bytes of anonymous memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0])


@pytest.mark.parametrize("attention", [GqaSpec(8, 2, 64, 0.25), MlaSpec(4, 0, 96, 16, 32, 12, 0.2)])
def test_the_cache_commits_what_is_written(attention: GqaSpec | MlaSpec) -> None:
    spec = ModelSpec(
        "x", 8, 8, 64, 1e-6, False, attention, RopeSpec(8, 1e4), RouterSpec(2, 1), (True,) * 2, 8
    )
    blocks = (1 << 30) // kv_block_bytes(spec, BLOCK, Dtype.BFLOAT16)
    before = committed()
    cache = KvCache(spec, blocks, BLOCK, torch.bfloat16)
    assert cache.nbytes > 1 << 29
    kv, last = cache.layers[1], torch.tensor([(blocks - 1) * BLOCK + 1])
    ones = torch.ones(1, *kv.k.shape[2:], dtype=torch.bfloat16)
    kv.write(last, ones, None if kv.v is None else torch.ones(1, *kv.v.shape[2:], dtype=torch.bfloat16))
    for rows in (kv.k, kv.v) if kv.v is not None else (kv.k,):
        assert rows[-1].flatten(1).sum(1).tolist() == [0, ones.numel(), 0, 0]
        assert not rows[0].any()
    assert committed() - before < 1 << 24
