"""Which kernels a rank takes, and what it says where FlashInfer cannot be had."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from ep_server.backends.gpu import capability
from ep_server.backends.gpu.attention import choice as attention_choice
from ep_server.backends.gpu.attention.choice import AttentionCase, choose, why_not_flashinfer
from ep_server.backends.gpu.attention.decode_kernels import TritonDecode
from ep_server.backends.gpu.attention.flashinfer_decode import FlashInferDecode, Xqa
from ep_server.errors import ConfigError
from ep_server.models.families.spec import GqaSpec, MlaSpec
from ep_server.models.sizes import Dtype
from tests.support.gpu.xqa import Xqa as StandIn

BF16, CPU = Dtype.BFLOAT16, torch.device("cpu")
QWEN = GqaSpec(32, 4, 128, 128**-0.5)
LATENT = MlaSpec(16, 0, 512, 128, 64, 128, 0.1)
HOPPER = AttentionCase(QWEN, BF16, BF16, 16, 4096, CPU, 132, (9, 0))
LATENT_CASE = replace(HOPPER, spec=LATENT)
EXPANDED = "chunks of prompts: hopper, on expanded latents"


def absent() -> Xqa:
    raise ModuleNotFoundError("No module named 'flashinfer'")


def broken() -> Xqa:
    def xqa(**given: object) -> None:
        raise RuntimeError("Ninja build failed.\nmore")

    return xqa


@pytest.mark.parametrize(
    "spec", [QWEN, replace(QWEN, window=128), GqaSpec(16, 16, 64, 0.1), GqaSpec(32, 1, 256, 0.1)]
)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_flashinfer_where_it_is_asked_for_and_can_run(spec: GqaSpec, block_size: int) -> None:
    xqa = StandIn()
    chosen = choose("flashinfer", replace(HOPPER, spec=spec, block_size=block_size), lambda: xqa)
    assert isinstance(chosen.kernels, FlashInferDecode)
    assert chosen.named.startswith("flashinfer (as asked")
    assert len(xqa.calls) == 1  # compiled before a graph is captured


@pytest.mark.parametrize("asked", ["auto", "triton"])
@pytest.mark.parametrize("case", [HOPPER, LATENT_CASE], ids=("gqa", "mla"))
def test_otherwise_ours_and_the_library_is_not_touched(asked: str, case: AttentionCase) -> None:
    chosen = choose(asked, case, absent)
    heads, kv_heads, v_dim = (32, 4, 128) if case is HOPPER else (16, 1, 512)
    hopper = asked == "auto"
    assert chosen.kernels == TritonDecode(heads, kv_heads, v_dim, 4096, 132, hopper)
    ours = "hopper" if case is HOPPER else f"hopper ({EXPANDED})"
    assert chosen.named == (ours if hopper else "triton (as asked)")
    assert chosen.copies == (hopper and case is LATENT_CASE)


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (
            replace(LATENT_CASE, spec=replace(LATENT, kv_lora=256)),
            "256 + 64 latent channels are not 512 + 64",
        ),
        (
            replace(LATENT_CASE, spec=replace(LATENT, rope_dim=32)),
            "512 + 32 latent channels are not 512 + 64",
        ),
        (replace(LATENT_CASE, capability=(8, 0)), "compute capability (8, 0) is not that of Hopper"),
        (replace(HOPPER, capability=None), "there is no GPU"),
        (replace(HOPPER, capability=(8, 0)), "compute capability (8, 0) is not that of Hopper"),
        (replace(HOPPER, dtype=Dtype.FLOAT32), "the model is served as float32, not bfloat16"),
        (replace(HOPPER, built=False), "the package was built without ep_server._cuda"),
        (replace(HOPPER, block_size=8), "scheduler.block_size = 8 is no power of two from 16"),
        (replace(HOPPER, block_size=48), "scheduler.block_size = 48 is no power of two from 16"),
        (replace(HOPPER, spec=replace(QWEN, head_dim=64)), "64 channels of a head are not 128"),
        (replace(HOPPER, spec=replace(QWEN, kv_heads=2)), "16 query heads share a KV head, more than 8"),
        (replace(HOPPER, spec=replace(QWEN, window=128)), "the model's attention has a window"),
        (replace(HOPPER, spec=replace(QWEN, clip=8.0)), "the model clips its projections"),
    ],
)
def test_what_our_kernel_for_hopper_is_not_for_is_tritons(case: AttentionCase, problem: str) -> None:
    assert choose("auto", case).named == f"triton ({problem})"


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (replace(LATENT_CASE, spec=replace(LATENT, heads=8)), "8 heads are no multiple of 16 up to 128"),
        (replace(LATENT_CASE, spec=replace(LATENT, heads=144)), "144 heads are no multiple of 16 up to 128"),
        (replace(LATENT_CASE, block_size=8), "scheduler.block_size = 8 is no power of two from 16"),
        (replace(LATENT_CASE, kv_dtype=Dtype.FP8), "the KV cache is float8_e4m3fn, not bfloat16"),
    ],
)
def test_chunks_of_latents_have_our_kernel_alone(case: AttentionCase, problem: str) -> None:
    chosen = choose("auto", case)
    assert chosen.copies and chosen.named == f"triton ({problem}; {EXPANDED})"


@pytest.mark.parametrize(
    "case",
    [
        replace(LATENT_CASE, spec=replace(LATENT, nope_dim=192)),
        replace(LATENT_CASE, spec=replace(LATENT, v_dim=256)),
        replace(LATENT_CASE, block_size=256),
    ],
)
def test_single_latent_tokens_have_our_kernel_alone(case: AttentionCase) -> None:
    chosen = choose("auto", case)
    assert not chosen.copies and chosen.named == "hopper (chunks of prompts: triton)"


def test_chunks_over_an_fp8_cache_have_our_kernel() -> None:
    chosen = choose("auto", replace(HOPPER, kv_dtype=Dtype.FP8))
    assert chosen.copies and chosen.kernels == TritonDecode(32, 4, 128, 4096, 132, hopper=False)
    assert chosen.named == (
        "triton (the KV cache is float8_e4m3fn, not bfloat16; chunks of prompts: hopper, on a bfloat16 copy)"
    )


@pytest.mark.parametrize(
    ("asked", "case"),
    [
        ("triton", HOPPER),
        ("auto", replace(HOPPER, capability=(8, 9))),
        ("auto", replace(HOPPER, built=False)),
        ("auto", replace(HOPPER, dtype=Dtype.FLOAT32)),
        ("auto", replace(HOPPER, block_size=4)),
        ("auto", replace(HOPPER, spec=replace(QWEN, window=128))),
        ("auto", replace(LATENT_CASE, spec=replace(LATENT, kv_lora=256))),
    ],
)
def test_chunks_over_an_fp8_cache_are_tritons(asked: str, case: AttentionCase) -> None:
    assert not choose(asked, replace(case, kv_dtype=Dtype.FP8)).copies


def test_no_other_cache_is_copied() -> None:
    assert not choose("auto", HOPPER).copies


@pytest.mark.parametrize("built", [True, False])
def test_a_rank_looks_for_the_module_of_that_kernel(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention_choice, "sm_count", lambda device: 132)
    monkeypatch.setattr(capability, "find_spec", lambda name: object() if built else None)
    case = AttentionCase.on(torch.device("cuda", 0), QWEN, (BF16, BF16), 16, 4096)
    chosen = choose("auto", case)
    assert chosen.kernels == TritonDecode(32, 4, 128, 4096, 132, hopper=built)
    assert chosen.named.startswith("hopper" if built else "triton (the package was built without")


OBSTACLES = [
    (LATENT_CASE, "the model's attention is latent"),
    (replace(HOPPER, capability=None), "there is no GPU"),
    (replace(HOPPER, capability=(8, 0)), "compute capability (8, 0) is none of (9, 10, 12)"),
    (replace(HOPPER, dtype=Dtype.FLOAT32), "the model is served as float32, not bfloat16"),
    (replace(HOPPER, kv_dtype=Dtype.FP8), "the KV cache is float8_e4m3fn, not bfloat16"),
    (replace(HOPPER, block_size=8), "scheduler.block_size = 8 is none of (16, 32, 64, 128)"),
    (replace(HOPPER, spec=GqaSpec(4, 2, 24, 1.0)), "24 channels of a head are no multiple of 16 up to 256"),
    (replace(HOPPER, spec=GqaSpec(4, 2, 512, 1.0)), "512 channels of a head are no multiple of 16 up to 256"),
    (replace(HOPPER, spec=GqaSpec(64, 1, 64, 1.0)), "64 query heads share a KV head, more than 32"),
]


@pytest.mark.parametrize(("case", "problem"), OBSTACLES, ids=[text for _, text in OBSTACLES])
def test_what_it_cannot_serve_is_refused_by_name(case: AttentionCase, problem: str) -> None:
    assert why_not_flashinfer(case) == problem
    message = f"model.attention = 'flashinfer': must be auto or triton here: {problem}"
    with pytest.raises(ConfigError, match=rf"\A{re.escape(message)}\Z"):
        choose("flashinfer", case, StandIn)


@pytest.mark.parametrize(
    ("load", "problem"),
    [
        (absent, "ModuleNotFoundError: No module named 'flashinfer'"),
        (broken, "RuntimeError: Ninja build failed."),
    ],
)
def test_a_library_that_is_missing_or_does_not_compile_is_named(load: object, problem: str) -> None:
    assert callable(load)
    with pytest.raises(ConfigError, match=rf"auto or triton here: {re.escape(problem)}\Z"):
        choose("flashinfer", HOPPER, load)


def test_interpreted_kernels_are_triton_and_not_split() -> None:
    case = AttentionCase.on(CPU, QWEN, (BF16, BF16), 16, 4096)
    assert choose("auto", case).kernels == TritonDecode(32, 4, 128, 4096, 0, hopper=False)
    assert why_not_flashinfer(case) == "there is no GPU"
