"""Launches every kernel at the shapes of real models, on meta tensors, and prints what was compiled as JSON.

    TRITON_INTERPRET=0 TRITON_DEFAULT_FP_FUSION=1 python -m tests.support.triton.shapes [--once] [part ...]

--once: of each kernel one variant for tensors of the same types.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from ep_server.backends.gpu.kernels.triton import stamps
from ep_server.backends.gpu.kernels.triton.embedding import RowTokens, embed
from ep_server.backends.gpu.kernels.triton.expand import ExpandedKv, expand_blocks
from ep_server.backends.gpu.kernels.triton.expert_rows import ExpertRows, ExpertWeights, tally
from ep_server.backends.gpu.kernels.triton.experts import run_experts, silu_mul
from ep_server.backends.gpu.kernels.triton.kv_blocks import gather_blocks, scatter_blocks
from ep_server.backends.gpu.kernels.triton.local_rows import (
    ExpertOutputs,
    Places,
    add_outputs_norm,
    place_rows,
)
from ep_server.backends.gpu.kernels.triton.logit_edits import add_listed, advance, allow_only, penalise
from ep_server.backends.gpu.kernels.triton.logprobs import SamplingReport, report
from ep_server.backends.gpu.kernels.triton.norm import add_rms_norm, rms_norm
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv
from ep_server.backends.gpu.kernels.triton.paged_decode import Workspace, decode
from ep_server.backends.gpu.kernels.triton.paged_prefill import prefill
from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.backends.gpu.kernels.triton.progress import count_layer
from ep_server.backends.gpu.kernels.triton.rope import HeadNorm, MlaInput, Rotation, store_gqa, store_mla
from ep_server.backends.gpu.kernels.triton.router import Choice, Drawn, route
from ep_server.backends.gpu.kernels.triton.sampling import sample
from ep_server.backends.gpu.kernels.triton.sampling_table import (
    RECORD,
    SamplingSpace,
    SamplingTable,
    Wants,
    write_slots,
)
from ep_server.backends.gpu.kernels.triton.step_words import Packed, room_for, spread
from ep_server.backends.gpu.kernels.triton.widen import widen_blocks
from ep_server.models.families.spec import GroupScore, RouterSpec, Score
from ep_server.models.kv_cache import KvLayer
from tests.support.triton.compiling import Recorder
from tests.support.triton.meta_tensors import (
    BF16,
    F32,
    FP8,
    I32,
    I64,
    TOKENS,
    gqa_cache,
    meta,
    mla_cache,
    sequences,
)


def norms() -> None:
    """Qwen3-30B-A3B's hidden 2048, DeepSeek-V3's 7168."""
    for hidden in (2048, 7168):
        x = meta(TOKENS, hidden)
        rms_norm(x, meta(hidden), 1e-6, x)
        add_rms_norm(x, x, meta(hidden), 1e-6, x)
        add_rms_norm(x, x, meta(hidden), 1e-6, x, x)
    silu_mul(meta(TOKENS, 2 * 6144), meta(TOKENS, 6144))


def ends_of_steps() -> None:
    """What comes ahead of the layers and behind them: Qwen3-30B-A3B on one rank and on four, DeepSeek-V3."""
    words = Packed(meta(room_for(9 * 129 + TOKENS * 24), dtype=I32), 129, TOKENS, 24)
    spread(words, meta(9, 2080, dtype=I32), meta(256, 2560, dtype=I32))
    ids, drawn = meta(TOKENS, dtype=I32), meta(256, dtype=I64)
    for hidden, vocab in ((2048, 151936), (7168, 129280)):
        x = meta(TOKENS, hidden)
        embed(RowTokens(ids, ids, drawn), meta(vocab, hidden), meta(hidden), 1e-6, x, x)
    for layers, experts in ((48, 128), (48, 32), (58, 32)):
        tally(meta(layers, experts, dtype=I32), meta(layers, experts, dtype=I64), meta(dtype=I64))


def rotations() -> None:
    """Qwen3-30B-A3B: 32 heads, 4 KV heads of 128, q/k norm. DeepSeek-V3: 128 heads, latent 512 + 64."""
    turn = Rotation(meta(4096, 64, 2, dtype=F32), meta(TOKENS, dtype=I64), meta(TOKENS, dtype=I64))
    for dtype in (BF16, FP8):
        store_gqa(
            meta(TOKENS, 40 * 128),
            meta(TOKENS, 32, 128),
            gqa_cache(dtype),
            turn,
            HeadNorm(meta(36, 128), 1e-6),
        )
    turn = Rotation(meta(4096, 32, 2, dtype=F32), meta(TOKENS, dtype=I64), meta(TOKENS, dtype=I64))
    down, q, out = meta(TOKENS, 2112), meta(TOKENS, 128, 192), meta(TOKENS, 128, 576)
    x = MlaInput(down[:, 1536:2048], down[:, 2048:], q[..., 128:], meta(512), 1e-6)
    for dtype in (BF16, FP8):
        store_mla(x, out[..., 512:], mla_cache(dtype), turn)


def partial_sums() -> None:
    """Of Qwen3-30B-A3B's projections and router: a part or more of the channels each."""
    turn = Rotation(meta(4096, 64, 2, dtype=F32), meta(TOKENS, dtype=I64), meta(TOKENS, dtype=I64))
    x, q, norm = meta(TOKENS, 2048), meta(TOKENS, 32, 128), HeadNorm(meta(36, 128), 1e-6)
    ids, gates = meta(TOKENS, 8, dtype=I64), meta(TOKENS, 8, dtype=F32)
    choice = Choice(RouterSpec(128, 8, renormalise=True), ids, gates, None, meta(1, dtype=I32))
    for parts in (3, 8, 16):
        store_gqa(Partial(meta(parts, TOKENS, 40 * 128, dtype=F32)), q, gqa_cache(BF16), turn, norm)
        add_rms_norm(Partial(meta(parts, TOKENS, 2048, dtype=F32)), x, meta(2048), 1e-6, x)
        route(Partial(meta(parts, TOKENS, 128, dtype=F32)), choice)


def decoding() -> None:
    """Split and whole, for Qwen3-30B-A3B and for DeepSeek-V3's latent attention."""
    for dtype in (BF16, FP8):
        for splits in (1, 4):
            for cache, heads, k_dim, v_dim in ((gqa_cache, 32, 128, 128), (mla_cache, 128, 576, 512)):
                work = Workspace(
                    meta(TOKENS, heads, splits, v_dim, dtype=F32), meta(TOKENS, heads, splits, 2, dtype=F32)
                )
                q, out = meta(TOKENS, heads, k_dim), meta(TOKENS, heads, v_dim)
                decode(q, cache(dtype), sequences(TOKENS), AttentionRule(0.1), work, out)


def prefilling() -> None:
    """Chunks of 2048 tokens."""
    for dtype in (BF16, FP8):
        for cache, heads, k_dim, v_dim in ((gqa_cache, 32, 128, 128), (mla_cache, 128, 576, 512)):
            q, out = meta(2048, heads, k_dim), meta(2048, heads, v_dim)
            prefill(q, meta(65, dtype=I32), cache(dtype), sequences(64), AttentionRule(0.1), out)


def widening() -> None:
    """A copy of 2048 blocks with 4 KV heads."""
    wide, blocks = gqa_cache(BF16).layer, meta(4096, dtype=I32)
    widen_blocks(gqa_cache(FP8), blocks, meta(1, dtype=I32), wide, 8 * 132)


def expanding() -> None:
    """Sixteen heads of DeepSeek-V3, 32768 positions."""
    room = 32768
    to = ExpandedKv(meta(16, room, 128), meta(16, room, 128), meta(room, 64))
    for dtype in (BF16, FP8):
        cache, blocks, count = mla_cache(dtype), meta(room // 16, dtype=I32), meta(1, dtype=I32)
        expand_blocks(cache, blocks, count, meta(16, 128, 512), meta(16, 512, 128), to, 132)


def routing() -> None:
    """Qwen3-30B-A3B and DeepSeek-V3, with all rows, with some, and with experts drawn."""
    v3 = RouterSpec(
        256, 8, score=Score.SIGMOID, bias=True, groups=8, top_groups=4, group_score=GroupScore.TOP2_SUM,
        renormalise=True, renorm_eps=1e-20, scale=2.5,
    )  # fmt: skip
    drawn = Drawn(meta(TOKENS, dtype=I32), meta(TOKENS, dtype=I32), 1, 2)
    for spec, bias in ((RouterSpec(128, 8, renormalise=True), None), (v3, meta(256, dtype=F32))):
        ids, weights = meta(TOKENS, 8, dtype=I64), meta(TOKENS, 8, dtype=F32)
        for count, how in ((None, None), (meta(1, dtype=I32), None), (meta(1, dtype=I32), drawn)):
            choice = Choice(spec, ids, weights, bias, count, how)
            route(meta(TOKENS, spec.num_experts, dtype=F32), choice)


def grouped() -> None:
    """Qwen3-30B-A3B on four ranks in BF16, every tile table; a DeepSeek-V3 rank of 32 experts in FP8."""
    counts, offsets = meta(32, dtype=I32), meta(33, dtype=I64)
    for rows_per_expert in (16, 32, 64, 512):
        weights = ExpertWeights(meta(32, 2 * 768, 2048), meta(32, 2048, 768))
        given = ExpertRows(meta(1024, 2048), counts, offsets)
        hidden, out = meta(1024, 768), meta(1024, 2048)
        run_experts(given, weights, hidden, out, rows_per_expert=rows_per_expert)
        index = dataclasses.replace(given, rows=meta(512, 2048), row_ids=meta(1024, dtype=I64))
        run_experts(index, weights, hidden, out, rows_per_expert=rows_per_expert)
    weights = ExpertWeights(
        meta(32, 4096, 7168, dtype=FP8), meta(32, 7168, 2048, dtype=FP8),
        meta(32, 32, 56, dtype=F32), meta(32, 56, 16, dtype=F32),
    )  # fmt: skip
    rows, scales = meta(32, 512, 7168, dtype=FP8), meta(32, 56, 512, dtype=F32).transpose(1, 2)
    for rows_per_expert in (16, 32, 64, 512):
        given = ExpertRows(rows, counts, offsets, scales)
        hidden, out = meta(32 * 512, 2048), meta(32, 512, 7168)
        run_experts(given, weights, hidden, out, rows_per_expert=rows_per_expert)


def sampling() -> None:
    """Qwen3-30B-A3B's vocabulary; every kernel, whatever the rows want."""
    vocab = 151936
    table = SamplingTable(
        meta(256, 8, dtype=F32), meta(256, 8, dtype=I64), meta(256, vocab, dtype=I32),
        meta(256, 1152, dtype=I32), meta(256, 1152, dtype=F32), meta(256, 1152, dtype=I32),
        meta(256, 4748, dtype=I32),
    )  # fmt: skip
    sums, one = meta(TOKENS, 16, dtype=I64), meta(TOKENS, dtype=F32)
    space = SamplingSpace(
        meta(TOKENS, 16, dtype=F32), meta(TOKENS, 16, dtype=I32), meta(TOKENS, 16, 128, dtype=F32),
        one, one, one, meta(TOKENS, dtype=I32), meta(TOKENS, 2048, dtype=F32), meta(TOKENS, 2048, dtype=I32),
        sums, sums, meta(TOKENS, dtype=I32), meta(TOKENS, 16, 8, dtype=F32), meta(TOKENS, 16, 8, dtype=I32),
        meta(TOKENS, 16, dtype=F32), meta(TOKENS, 16, 8, dtype=I64),
    )  # fmt: skip
    chosen, slots, tokens = meta(TOKENS, dtype=F32), meta(TOKENS, dtype=I32), meta(TOKENS, dtype=I64)
    out = SamplingReport(chosen, meta(TOKENS, 20, dtype=F32), meta(TOKENS, 20, dtype=I32))
    logits = meta(TOKENS, vocab, dtype=F32)
    for edit in (penalise, add_listed, allow_only):
        edit(logits, slots, table)
    advance(tokens, slots, table, tokens)
    write_slots(meta(3, RECORD, dtype=I32), table)
    for dtype in (F32, BF16):
        logits = meta(TOKENS, vocab, dtype=dtype)
        sample(logits, slots, table, space, tokens, Wants(sum(Wants)))
        report(logits, slots, table, space, tokens, out)


def stamping() -> None:
    """Six phases."""
    marks, step, counts = meta(2, dtype=I64), meta(6, dtype=I64), meta(6, stamps.BUCKETS, dtype=I64)
    stamps.begin(marks, step)
    stamps.lap(marks, step, 5)
    stamps.end(marks, marks, counts[0])
    stamps.record_times(step, step, counts)


def counting_layers() -> None:
    count_layer(meta(1, dtype=I64), meta(1, dtype=I64))


def small_float32() -> None:
    """Checkpoints of tests, in which greedy tokens are compared with transformers'."""
    count = meta(1, dtype=I32)
    x, q = meta(8, 64, dtype=F32), meta(8, 4, 16, dtype=F32)
    norm, positions = meta(64, dtype=F32), meta(8, dtype=I64)
    add_rms_norm(x, x, norm, 1e-6, x)
    kv = PagedKv(KvLayer(meta(64, 4, 2, 16, dtype=F32), meta(64, 4, 2, 16, dtype=F32), 16))
    turn = Rotation(meta(64, 8, 2, dtype=F32), positions, positions)
    store_gqa(meta(8, 128, dtype=F32), q, kv, turn, HeadNorm(meta(6, 16, dtype=F32), 1e-6), 8.0)
    latent = PagedKv(KvLayer(meta(64, 4, 1, 40, dtype=F32), None, 32))
    turn = Rotation(meta(64, 4, 2, dtype=F32), positions, positions)
    down, wide, out = meta(8, 40, dtype=F32), meta(8, 4, 40, dtype=F32), meta(8, 4, 32, dtype=F32)
    mla = MlaInput(down[:, :32], down[:, 32:], meta(8, 4, 8, dtype=F32), meta(32, dtype=F32), 1e-6)
    store_mla(mla, wide[..., 32:], latent, turn)
    for cache, query, result in ((kv, q, q), (latent, wide, out)):
        work = Workspace(meta(8, 4, 2, result.shape[2], dtype=F32), meta(8, 4, 2, 2, dtype=F32))
        decode(query, cache, sequences(8), AttentionRule(0.2, 6), work, result)
        prefill(query, meta(9, dtype=I32), cache, sequences(8), AttentionRule(0.2, 6), result)
    ids, gates = meta(8, 2, dtype=I64), meta(8, 2, dtype=F32)
    choice = Choice(RouterSpec(6, 2, groups=3, top_groups=2), ids, gates, None, count)
    route(meta(8, 6, dtype=F32), choice)
    weights = ExpertWeights(meta(6, 64, 64, dtype=F32), meta(6, 64, 32, dtype=F32))
    given = ExpertRows(
        meta(16, 64, dtype=F32), meta(6, dtype=I32), meta(7, dtype=I64), None, meta(16, dtype=I64)
    )
    run_experts(given, weights, meta(16, 32, dtype=F32), meta(16, 64, dtype=F32))


def local_rows() -> None:
    """A rank without peers."""
    ids = meta(TOKENS, 8, dtype=I64)
    places = Places(
        meta(128, dtype=I32), meta(129, dtype=I64), meta(TOKENS * 8, dtype=I64), meta(TOKENS, 8, dtype=I32)
    )
    place_rows(ids, places, meta(128, dtype=I32))
    for hidden in (2048, 7168):
        x, rows, gates = meta(TOKENS, hidden), meta(TOKENS * 8, hidden), meta(TOKENS, 8, dtype=F32)
        for shared in (None, x):
            answers = ExpertOutputs(rows, ids, gates, places.rows, shared)
            add_outputs_norm(answers, x, meta(hidden), 1e-6, x)


def moving_blocks() -> None:
    """Parts of a BF16 cache and of a latent one in FP8."""
    for size in (16 * 4 * 128 * 2, 16 * 576):
        buffer = meta(6, 96, size, dtype=torch.uint8)
        for copy in (gather_blocks, scatter_blocks):
            copy(meta(96, dtype=I64), meta(4, dtype=I64), buffer)


PARTS = (
    moving_blocks,
    ends_of_steps, local_rows, norms, rotations, partial_sums, decoding, prefilling, widening, expanding,
    routing, grouped, sampling, stamping, counting_layers, small_float32,
)  # fmt: skip

if __name__ == "__main__":
    once = "--once" in sys.argv
    done: set[str] = set()
    wanted = [name for name in sys.argv[1:] if name != "--once"]
    for part in [part for part in PARTS if not wanted or part.__name__ in wanted]:
        with Recorder(done if once else None) as recorder:
            part()
        done |= {one.name for one in recorder.compiled}
        for one in recorder.compiled:
            print(json.dumps({"part": part.__name__, **dataclasses.asdict(one)}), flush=True)
