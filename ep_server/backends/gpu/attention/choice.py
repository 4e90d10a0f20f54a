"""Chooses at startup the kernels for attention with one token per sequence on a rank's GPU.

`auto` uses our Hopper kernels if they support the model, also for chunks of prompts, else Triton's. Over an
FP8 cache only chunks have one, which reads a copy in bfloat16. Chunks of latent attention have one that
reads expanded latents, in steps where that pays. Beside FlashInfer all chunks use Triton's: its kernels for
both plan every step on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ep_server.backends.gpu.attention.decode_kernels import DecodeKernels, triton_decode
from ep_server.backends.gpu.attention.flashinfer_decode import FlashInferDecode, Xqa, XqaShape, load_xqa
from ep_server.backends.gpu.capability import NATIVE, native_built, sm_count
from ep_server.backends.gpu.kernels.hopper.attention import shape_obstacle
from ep_server.backends.gpu.kernels.hopper.mla import mla_obstacle
from ep_server.backends.gpu.kernels.hopper.prefill import latent_prefill_obstacle, prefill_obstacle
from ep_server.errors import ConfigError
from ep_server.models.families.spec import GqaSpec, MlaSpec
from ep_server.models.sizes import Dtype

FIELD = "model.attention"
XQA_MAJORS = (9, 10, 12)  # compute capability
XQA_BLOCKS = (16, 32, 64, 128)  # tokens
XQA_MOST_CHANNELS, XQA_MOST_GROUP = 256, 32


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The case to choose for. dtype: served. longest: context, tokens; block_size: tokens.

    num_sms: multiprocessors; capability: of the GPU; 0 and None if kernels are interpreted.
    built: whether the package has its CUDA module.
    """

    spec: GqaSpec | MlaSpec
    dtype: Dtype
    kv_dtype: Dtype
    block_size: int
    longest: int
    device: torch.device
    num_sms: int = 0
    capability: tuple[int, int] | None = None
    built: bool = True

    @staticmethod
    def on(
        device: torch.device,
        spec: GqaSpec | MlaSpec,
        dtypes: tuple[Dtype, Dtype],
        block_size: int,
        longest: int,
    ) -> AttentionCase:
        """Reads the device's properties. dtypes: served, and of the KV cache."""
        if device.type != "cuda":
            return AttentionCase(spec, *dtypes, block_size, longest, device)
        capability = torch.cuda.get_device_capability(device)
        count, built = sm_count(device), native_built()
        return AttentionCase(spec, *dtypes, block_size, longest, device, count, capability, built)


@dataclass(frozen=True, slots=True)
class Chosen:
    """named: for the log, with the reason. copies: chunks may attend to a copy of the cache."""

    kernels: DecodeKernels
    named: str
    copies: bool = False


def choose(asked: str, case: AttentionCase, load: Callable[[], Xqa] = load_xqa) -> Chosen:
    """The kernels of a rank, compiled.

    Args:
        asked: ModelConfig.attention. load: imports the library.
    Raises: ConfigError with the reason if FlashInfer is configured but cannot be used.
    """
    if asked != "flashinfer":
        reason = hopper_obstacle(case) if asked == "auto" else "as asked"
        kernels = triton_decode(case.spec, case.longest, case.num_sms, hopper=not reason)
        copies = asked == "auto" and not copy_obstacle(case)
        chunks = ""
        if isinstance(case.spec, MlaSpec):
            chunks = f"chunks of prompts: {'hopper, on expanded latents' if copies else 'triton'}"
        elif copies:
            chunks = "chunks of prompts: hopper, on a bfloat16 copy"
        name = "triton" if reason else "hopper"
        detail = "; ".join(text for text in (reason, chunks if copies or not reason else "") if text)
        return Chosen(kernels, f"{name} ({detail})" if detail else name, copies)
    problem = why_not_flashinfer(case)
    if problem:
        raise _refused(problem)
    try:
        compiled = _flashinfer(case, load())
        compiled.prepare()
    except Exception as error:  # the library raises anything, of the import, the compiler or the driver
        raise _refused(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    return Chosen(compiled, "flashinfer (as asked; chunks of prompts: triton)")


def hopper_obstacle(case: AttentionCase) -> str:
    """Why our Hopper kernels (kernels/hopper) cannot serve a case; "" if they can."""
    problem = _why_not_bf16(case, (9,), "not that of Hopper")
    if problem or not case.built:
        return problem or f"the package was built without {NATIVE}"
    if isinstance(case.spec, MlaSpec):
        return mla_obstacle(case.spec, case.block_size)
    return shape_obstacle(case.spec, case.block_size)


def copy_obstacle(case: AttentionCase) -> str:
    """Why chunks cannot attend to a copy of the cache by our Hopper kernel, or need none; "" if they can."""
    latent, fp8 = isinstance(case.spec, MlaSpec), case.kv_dtype is Dtype.FP8
    if not latent and not fp8:
        return f"the KV cache is {case.kv_dtype}, not {Dtype.FP8}"
    readable = replace(case, kv_dtype=Dtype.BFLOAT16) if fp8 else case
    problem = _why_not_bf16(readable, (9,), "not that of Hopper")
    if problem or not case.built:
        return problem or f"the package was built without {NATIVE}"
    if isinstance(case.spec, MlaSpec):
        return latent_prefill_obstacle(case.spec, case.block_size)
    return prefill_obstacle(case.spec, case.block_size)


def why_not_flashinfer(case: AttentionCase) -> str:
    """Why FlashInfer's decode cannot serve a case; "" if it can, provided that it is installed."""
    spec = case.spec
    if isinstance(spec, MlaSpec):
        return "the model's attention is latent"
    problem = _why_not_bf16(case, XQA_MAJORS, f"none of {XQA_MAJORS}")
    if problem:
        return problem
    group = spec.heads // spec.kv_heads
    limits = (
        (
            case.block_size not in XQA_BLOCKS,
            f"scheduler.block_size = {case.block_size} is none of {XQA_BLOCKS}",
        ),
        (
            spec.head_dim % 16 != 0 or spec.head_dim > XQA_MOST_CHANNELS,
            f"{spec.head_dim} channels of a head are no multiple of 16 up to {XQA_MOST_CHANNELS}",
        ),
        (group > XQA_MOST_GROUP, f"{group} query heads share a KV head, more than {XQA_MOST_GROUP}"),
    )
    return next((text for applies, text in limits if applies), "")


def _why_not_bf16(case: AttentionCase, majors: tuple[int, ...], otherwise: str) -> str:
    """Requirements that all BF16 kernels for certain GPUs share."""
    capability = case.capability
    limits = (
        (capability is None, "there is no GPU"),
        (
            capability is not None and capability[0] not in majors,
            f"compute capability {capability} is {otherwise}",
        ),
        (case.dtype is not Dtype.BFLOAT16, f"the model is served as {case.dtype}, not bfloat16"),
        (case.kv_dtype is not Dtype.BFLOAT16, f"the KV cache is {case.kv_dtype}, not bfloat16"),
    )
    return next((text for applies, text in limits if applies), "")


def _flashinfer(case: AttentionCase, xqa: Xqa) -> FlashInferDecode:
    spec = case.spec
    assert isinstance(spec, GqaSpec)
    shape = XqaShape(spec.heads, spec.kv_heads, spec.head_dim, case.block_size, spec.window > 0)
    return FlashInferDecode(xqa, shape, case.num_sms, case.device)


def _refused(problem: str) -> ConfigError:
    return ConfigError(FIELD, "flashinfer", f"auto or triton here: {problem}")
