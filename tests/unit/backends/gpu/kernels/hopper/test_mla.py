"""How latent attention for Hopper is launched; its results need one (tests/gpu)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ep_server.backends.gpu import decoder
from ep_server.backends.gpu.attention import decode_kernels
from ep_server.backends.gpu.graphs import GraphKey, buckets_up_to
from ep_server.backends.gpu.kernels.hopper.mla import (
    HopperMla,
    HopperMlaStep,
    MlaLaunchConfig,
    mla_launch_config_for,
)
from ep_server.backends.gpu.kernels.triton.launch import block
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_decode import Workspace, decode
from ep_server.backends.gpu.step_input import Singles, StepTensors
from ep_server.errors import InternalError
from ep_server.models.families.spec import MlaSpec
from ep_server.models.kv_cache import KvLayer
from tests.support.gpu.runners import gpu_runner, staggered
from tests.support.models.checkpoints import Tiny

LITE, BF16 = MlaSpec(16, 0, 512, 128, 64, 128, 0.1), torch.bfloat16


def cache(size: int = 16, heads: int = 1, dim: int = 576, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(3, size, heads, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("sequences", "longest", "wanted"),
    [
        (1, 64, MlaLaunchConfig(1, 132)),
        (1, 320, MlaLaunchConfig(4, 132)),
        (1, 1000, MlaLaunchConfig(4, 132)),
        (1, 4096, MlaLaunchConfig(4, 132, 16)),
        (1, 1 << 20, MlaLaunchConfig(4, 132, 64)),
        (3, 4096, MlaLaunchConfig(4, 132, 16)),
        (16, 4096, MlaLaunchConfig(4, 132, 4)),
        (17, 4096, MlaLaunchConfig(4, 132)),
        (32, 1 << 20, MlaLaunchConfig(4, 132)),
        (64, 4096, MlaLaunchConfig(4, 132)),
        (66, 4096, MlaLaunchConfig(4, 132)),
        (67, 4096, MlaLaunchConfig(2, 132)),
        (132, 4096, MlaLaunchConfig(2, 132)),
        (133, 4096, MlaLaunchConfig(1, 132)),
        (512, 4096, MlaLaunchConfig(1, 132)),
    ],
)
@pytest.mark.parametrize("heads", [16, 32])
def test_few_sequences_have_many_warpgroups(
    sequences: int, longest: int, wanted: MlaLaunchConfig, heads: int
) -> None:
    assert mla_launch_config_for(sequences, heads, 132, longest) == wanted


@pytest.mark.parametrize(
    ("sequences", "heads", "splits"),
    [(1, 128, 16), (32, 128, 2), (33, 128, 2), (34, 128, 1), (66, 64, 2), (67, 64, 1), (256, 128, 1)],
)
def test_with_many_heads_contexts_are_cut(sequences: int, heads: int, splits: int) -> None:
    assert mla_launch_config_for(sequences, heads, 132, 4096) == MlaLaunchConfig(1, 132, splits)


@pytest.mark.parametrize("longest", [320, 4096, 40960, 1 << 20])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("num_sms", [78, 114, 132])
def test_any_number_of_sequences_is_cut_as_some_bucket_is(num_sms: int, heads: int, longest: int) -> None:
    """Beside prompts there may be any number; what joins the parts is compiled for those of the buckets."""
    for most in (3, 24, 200):
        at_start = {mla_launch_config_for(n, heads, num_sms, longest).splits for n in buckets_up_to(most)}
        later = {mla_launch_config_for(n, heads, num_sms, longest).splits for n in range(1, most + 1)}
        assert {block(splits) for splits in later} == {block(splits) for splits in at_start}


@pytest.mark.parametrize(
    ("kv", "spec", "wrong"),
    [
        (PagedKv(KvLayer(cache(), cache(), 512)), LITE, "the cache has a v"),
        (PagedKv(KvLayer(cache(heads=2), None, 512)), LITE, "cache k: "),
        (PagedKv(KvLayer(cache(dim=512), None, 512)), LITE, "cache k: "),
        (PagedKv(KvLayer(cache(dtype=torch.float16), None, 512)), LITE, "cache k: torch.float16"),
        (PagedKv(KvLayer(cache(24), None, 512)), LITE, "scheduler.block_size = 24"),
        (PagedKv(KvLayer(cache(), None, 512)), replace(LITE, heads=20), "20 heads are no multiple of 16"),
        (PagedKv(KvLayer(cache(), None, 512)), replace(LITE, kv_lora=256), "256 + 64 latent channels"),
    ],
)
def test_caches_that_it_cannot_read_are_refused(kv: PagedKv, spec: MlaSpec, wrong: str) -> None:
    with pytest.raises(InternalError, match=re.escape(wrong)):
        HopperMla(kv, spec)


@pytest.mark.parametrize(
    ("lengths", "blocks", "splits", "wrong"),
    [
        (torch.zeros(4), torch.zeros(4, 3, dtype=torch.int32), 1, "lengths: "),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int64), 1, "blocks: "),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32).T, 1, "blocks: "),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32), 65, "splits = 65: "),
    ],
)
def test_so_is_a_step_of_other_numbers(
    lengths: torch.Tensor, blocks: torch.Tensor, splits: int, wrong: str
) -> None:
    row = torch.zeros(4, dtype=torch.int32)
    step = StepTensors(row, row, row, row, row, blocks, row, Singles(lengths, row), None, None, row)
    with pytest.raises(InternalError, match=f"^{wrong}"):
        HopperMlaStep(step, 16, MlaLaunchConfig(16, 132, splits))


class ByTriton(HopperMla):
    """In place of the kernel: attention by Triton's, as the decoder calls it, over single tokens alone."""

    def __init__(self, kv: PagedKv, spec: MlaSpec) -> None:
        self.kv, self.spec = kv, spec

    def run(self, q: torch.Tensor, step: HopperMlaStep, out: torch.Tensor) -> None:
        assert isinstance(step, SingleTokens) and len(q) == len(out) == step.count
        space = Workspace.of(step.count, self.spec.heads, 1, self.spec.kv_lora, q.device)
        decode(q, self.kv, step.sequences, AttentionRule(self.spec.scale), space, out)


class SingleTokens(HopperMlaStep):
    def __init__(self, step: StepTensors, heads: int, config: MlaLaunchConfig) -> None:
        self.count = len(step.singles)
        self.sequences = Sequences(step.blocks[: self.count], step.singles.lengths)


def test_decoder_uses_it_for_single_tokens_and_triton_for_chunks(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all sequences of the bucket, chunks as padding, and what it leaves there is replaced."""

    def never(*_: object) -> None:
        raise AssertionError("single tokens were Triton's")

    monkeypatch.setattr(decoder, "hopper_mla", ByTriton)
    monkeypatch.setattr(decoder, "HopperMlaStep", SingleTokens)
    monkeypatch.setattr(decode_kernels, "decode", never)
    model, prompts, keys = tiny("deepseek_v2-lite-yarn"), 2, (GraphKey(4), GraphKey(20))
    tokens, _ = staggered(gpu_runner(model.path, keys), model, prompts)
    assert tokens == {number: list(model.tokens[number][:3]) for number in range(prompts)}
