"""Which machine code Triton would make for the launches of a step, found without a GPU; nothing is run.

Triton compiles a kernel anew for other dtypes, constants, integers that are 1 or divide by 16, and addresses
that do: so a set of these is what a rank has compiled. What the kernels would compute is left as it is, which
no launch depends on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from ep_server.backends.assembly import LoadParams, load_model
from ep_server.backends.gpu import capability
from ep_server.backends.gpu.attention import expanded, widened
from ep_server.backends.gpu.attention.decode_kernels import triton_decode
from ep_server.backends.gpu.chunk_copies import CopyRule
from ep_server.backends.gpu.expansion import Expansion
from ep_server.backends.gpu.graphs import captured_keys
from ep_server.backends.gpu.kernels.hopper import attention as hopper_attention
from ep_server.backends.gpu.kernels.triton.expand import TILE
from ep_server.backends.gpu.moe.rows import FusedRows, LocalRows, RowsOfSteps
from ep_server.backends.gpu.runner import GpuOptions, GpuRunner
from ep_server.backends.gpu.step_input import InputShape
from ep_server.backends.gpu.widening import Widening
from ep_server.backends.torch_compute import TorchCompute, TorchLinear
from ep_server.exchange.api import ExchangeSpec, Payload, Received, View
from ep_server.models.decoder import DecoderParams
from ep_server.models.families.spec import GqaSpec, MlaSpec
from ep_server.models.kv_cache import KvCache

Launch = tuple[object, ...]
CPU, BLOCK, BLOCKS, MULTIPROCESSORS = torch.device("cpu"), 16, 600, 132
GQA = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 1000,
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
    "intermediate_size": 96, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
MLA = {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 1000,
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
    "intermediate_size": 96, "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "scoring_func": "softmax", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "attention_bias": False, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank is like. ranks: of its group. sequences, tokens: of its largest step. blocks: of KV.

    hopper: single tokens have a kernel of their own, as on Hopper. copies: chunks do, over a copy of the
    cache: of FP8 codes, or of latents in bfloat16.
    """

    config: dict[str, Any]
    ranks: int = 1
    sequences: int = 160
    tokens: int = 2048
    overlap: str = "off"
    graphs: bool = True
    blocks: int = BLOCKS
    hopper: bool = False
    copies: bool = False


@contextmanager
def kernels_for_hopper() -> Iterator[None]:
    """Attention by StillNative where a rank on Hopper has its kernels."""
    names = "AttentionWork", "AttentionLaunchConfig", "Attention", "Shares"
    native = SimpleNamespace(**dict.fromkeys(names, StillNative))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capability, "import_module", lambda _: native)
        patch.setattr(
            hopper_attention,
            "hopper_attention_fits",
            lambda kv, spec: not kv.fp8 and not hopper_attention.shape_obstacle(spec, kv.block_size),
        )
        patch.setattr(widened, "HopperPrefill", StillPrefill)
        patch.setattr(expanded, "HopperLatentPrefill", StillPrefill)
        patch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
        yield


@contextmanager
def recorded() -> Iterator[set[Launch]]:
    """What is launched inside, of which nothing runs."""
    launches: set[Launch] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.add(specialisation(kernel, args, kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        yield launches


@contextmanager
def without_products() -> Iterator[None]:
    """Meanwhile the library's products give tensors of their shapes, filled by nobody.

    On a CPU they take nearly all of the time of a step in bfloat16, and no launch depends on a value.
    """

    def empty(self: TorchLinear, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], len(self.weight))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchLinear, "__call__", empty)
        yield


def specialisation(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """All that two launches of the same machine code have in common."""
    params = _parameters(kernel)
    bound = dict(zip([name for name, *_ in params], args, strict=False)) | kwargs
    key: list[object] = [kernel.__name__]
    for name, constant, number, aligned in params:
        key.append((name, *_of(bound.pop(name), constant, number, aligned)))
    return (*key, *sorted(bound.items()))  # what is left are options, as the number of warps


@cache
def _parameters(kernel: Any) -> list[tuple[str, bool, bool, bool]]:
    """Of each: name, whether it is a constant, and whether being 1 or divisible by 16 makes other code."""
    return [
        (
            p.name,
            p.is_constexpr,
            not p.do_not_specialize,
            not (p.do_not_specialize or p.do_not_specialize_on_alignment),
        )
        for p in JITFunction(kernel.fn, **kernel.kwargs).params  # which reads the kernel's source anew
    ]


def _of(value: Any, constant: bool, number: bool, aligned: bool) -> tuple[object, ...]:
    if constant or value is None or isinstance(value, bool):
        return (str(value),)
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), aligned and value.data_ptr() % 16 == 0)
    if isinstance(value, float):
        return ("float",)
    wide = not -(2**31) <= value < 2**31
    return ("int", wide, number and value == 1, aligned and value % 16 == 0)


class StillNative:
    """In place of what `_cuda` has for attention: takes what it is given, and does nothing."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def run(self, **given: Any) -> None:
        assert given["step"].given["count"] > 0

    def cut(self, **_: Any) -> None:
        pass


class StillPrefill:
    """In place of a HopperPrefill, or of a HopperLatentPrefill."""

    def __init__(self, *_: Any) -> None:
        pass

    def run(self, *_: Any) -> None:
        pass


class StillExchange:
    """In place of a NvlinkExchange, of which nobody hears: tensors of its shapes, filled by nobody."""

    def __init__(self, spec: ExchangeSpec) -> None:
        self.spec, self.device, self._rows = spec, CPU, torch.zeros(4096, spec.hidden, dtype=torch.bfloat16)

    def dispatch(self, x: torch.Tensor, ids: object, weights: object, view: View, **how: Any) -> Received:
        local = len(self.spec.local_experts)
        counts, offsets = torch.empty(local, dtype=torch.int32), torch.empty(local + 1, dtype=torch.int64)
        row_ids = torch.empty(how["capacity"], dtype=torch.int64)
        return Received(self._rows, counts, offsets, x, view, row_ids=row_ids)

    def combine(self, expert_out: torch.Tensor, received: Received, **how: Any) -> torch.Tensor:
        assert isinstance(received.handle, torch.Tensor)
        return torch.empty_like(received.handle)

    def can_norm(self, norm: object) -> bool:
        return True

    def bounded(self, num_sms: int) -> nullcontext[Callable[[], None]]:
        return nullcontext(lambda: None)


def still_runner(folder: Path, rank: Rank) -> GpuRunner:
    """A runner of random weights, as a rank builds it, before its first step."""
    (folder / "config.json").write_text(json.dumps(rank.config))
    experts = rank.config.get("num_experts") or rank.config["n_routed_experts"]
    placement = tuple(e % rank.ranks for e in range(experts))
    params = LoadParams(str(folder), 0, placement, "bfloat16", compute=TorchCompute(CPU), load_format="dummy")
    model = load_model(params)
    top_k = model.spec.router.top_k
    spec = ExchangeSpec(0, rank.ranks, placement, rank.tokens, model.spec.hidden, top_k, Payload.BF16)
    exchange: Any = StillExchange(spec)
    attention = model.spec.attention
    codes = rank.copies and isinstance(attention, GqaSpec)
    held = torch.float8_e4m3fn if codes else torch.bfloat16
    cache = KvCache(model.spec, rank.blocks, BLOCK, held, CPU)
    decoder = DecoderParams(model.spec, model.weights, exchange, cache, model.max_context, model.compute)
    rows = LocalRows() if rank.ranks == 1 else FusedRows(exchange)
    sizes = rank.sequences, rank.tokens, rank.overlap
    forms = captured_keys(*sizes, copies=rank.copies) if rank.graphs else []
    shape = InputShape(rank.tokens, rank.sequences, model.max_context // BLOCK, BLOCK)
    kernels = triton_decode(model.spec.attention, model.max_context, MULTIPROCESSORS)
    copies: CopyRule | None = None
    if rank.copies and isinstance(attention, GqaSpec):
        copies = Widening.of(attention, BLOCK, rank.blocks, MULTIPROCESSORS)
    elif rank.copies and isinstance(attention, MlaSpec):
        copies = Expansion.of(attention, BLOCK, rank.blocks * BLOCK // TILE, MULTIPROCESSORS)
    options = GpuOptions(shape, RowsOfSteps(rows, rows), tuple(forms), kernels=kernels, copies=copies)
    return GpuRunner(decoder, options)
