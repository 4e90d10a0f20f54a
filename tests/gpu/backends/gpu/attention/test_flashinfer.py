"""FlashInfer's decode on a GPU: results, a captured step, a rank process, what it refuses.

Shapes are those of scripts/gpu_flashinfer.py, so nothing is compiled where only its modules were taken along.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ep_server.backends.gpu.attention.choice import AttentionCase, choose
from ep_server.backends.gpu.attention.decode_kernels import DecodeKernels
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule
from ep_server.errors import ConfigError
from ep_server.models.families.spec import GqaSpec
from ep_server.models.sizes import Dtype
from ep_server.ranks.launcher import RankProcesses
from tests.support.gpu.xqa import step_case
from tests.support.models.answers import Answers
from tests.support.ranks.gpu_engine import begins_alike, drawn
from tests.support.ranks.rank_group import Recorder, rank_config
from tests.support.triton.harness import DEVICE, NAN, assert_near, random
from tests.support.triton.paged_case import Heads, PagedCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer-python"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9,
        reason="needs compute capability 9.0",
    ),
]

BF16 = torch.bfloat16
QWEN, MIXTRAL, TINY = Heads(32, 4, 128, 128), Heads(32, 8, 128, 128), Heads(4, 2, 16, 16)
FIELDS = {"model__dtype": "bfloat16", "model__attention": "flashinfer", "scheduler__block_size": 16}
LENGTHS = {
    "one, in parts": [1500],
    "few, in parts": [1, 0, 64, 300, 256, 257],
    "many": [(37 * s) % 600 for s in range(80)],
}


def kernels_of(heads: Heads, window: int = 0) -> DecodeKernels:
    spec = GqaSpec(heads.heads, heads.kv_heads, heads.k_dim, 1.0, window=window)
    case = AttentionCase.on(DEVICE, spec, (Dtype.BFLOAT16, Dtype.BFLOAT16), 16, 4096)
    return choose("flashinfer", case).kernels


def assert_attends(case: PagedCase, q: torch.Tensor, got: torch.Tensor, rule: AttentionRule) -> None:
    """Padding gives numbers."""
    assert bool(got.isfinite().all())
    for s, length in enumerate(case.sequences.lengths.tolist()):
        if length:
            wanted = case.attend(s, q[s].cpu(), length - 1, rule.scale, rule.window)
            assert_near(got[s].cpu(), wanted, 4)


def on_host(case: PagedCase) -> PagedCase:
    """Its keys and values as the oracle takes them."""
    case.keys, case.values = ([x.cpu() for x in rows] for rows in (case.keys, case.values))
    return case


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("heads", [QWEN, MIXTRAL, TINY], ids=("qwen", "mixtral", "tiny"))
def test_results_are_those_of_attention(heads: Heads, lengths: list[int]) -> None:
    """Unused cache slots are NaN, table entries beyond a sequence point far outside."""
    case, rule = on_host(step_case(lengths, heads)), AttentionRule(0.1)
    q = random(len(lengths), heads.heads, heads.k_dim, dtype=BF16, seed=1)
    out = torch.full_like(q, NAN)
    kernels_of(heads).over(case.sequences)(q, case.kv, rule, out)
    assert_attends(case, q, out, rule)


def test_a_window() -> None:
    case, rule = on_host(step_case([3, 40, 500], QWEN)), AttentionRule(0.1, window=70)
    q = random(3, QWEN.heads, QWEN.k_dim, dtype=BF16)
    out = torch.full_like(q, NAN)
    kernels_of(QWEN, window=70).over(case.sequences)(q, case.kv, rule, out)
    assert_attends(case, q, out, rule)


@pytest.mark.parametrize("lengths", [[900, 40], [200 + s for s in range(40)]], ids=("in parts", "whole"))
def test_captured_step_reads_current_lengths_and_tables(lengths: list[int]) -> None:
    """The second replay has shorter contexts and the first two sequences in each other's rows."""
    case, rule = on_host(step_case(lengths, QWEN)), AttentionRule(0.1)
    q = random(len(lengths), QWEN.heads, QWEN.k_dim, dtype=BF16)
    out, kernels, graph = torch.empty_like(q), kernels_of(QWEN), torch.cuda.CUDAGraph()
    kernels.over(case.sequences)(q, case.kv, rule, out)
    with torch.cuda.graph(graph):
        kernels.over(case.sequences)(q, case.kv, rule, out)
    for turn in range(2):
        out.fill_(NAN)
        graph.replay()
        assert_attends(case, q, out, rule)
        if not turn:
            for moved in (case.sequences.blocks, case.sequences.lengths):
                moved[:2] = moved[:2].flip(0).clone()
            case.sequences.lengths.sub_(7)
            case.keys[:2], case.values[:2] = case.keys[1::-1], case.values[1::-1]


async def test_a_rank_process_decodes_with_it(answers: dict[str, Answers]) -> None:
    model = answers["qwen3_moe"]
    tokens, heard = await drawn(model, 1, **FIELDS)
    assert begins_alike(model, tokens)
    assert [ready.attention.partition(" ")[0] for ready in heard.ready] == ["flashinfer"]


async def test_a_rank_process_that_cannot_says_why(answers: dict[str, Answers]) -> None:
    latent = next(model for name, model in sorted(answers.items()) if name.startswith("deepseek_v2"))
    group, heard = RankProcesses(rank_config(latent.path, 1, parallel__device="cuda", **FIELDS)), Recorder()
    try:
        with pytest.raises(ConfigError, match=r"model\.attention = 'flashinfer': .*attention is latent"):
            await group.start(heard, heard.on_progress)
    finally:
        await group.stop()
