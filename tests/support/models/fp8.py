"""FP8 checkpoints as DeepSeek-V3's: e4m3 codes with a scale per block, beside the same model widened.

What transformers answers is that of the widened one, in float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from ep_server.models.loading import Codes, widen
from tests.support.models.checkpoints import VOCAB, Case, random_model

if TYPE_CHECKING:
    import transformers

BLOCK = (128, 128)
EXPERTS = 4  # all are chosen for every token: no rounding turns a choice
E4M3_MAX = 448.0
COUNT = 3  # tokens of an answer
MARGIN = 0.12  # between the best two logits, whose deviation is 0.9: what FP8 rows and caches do not turn
PROMPTS = (tuple((i * i * 31 + 35) % VOCAB for i in range(11)), (7, 91, 180))

_SIZES = {"hidden_size": 256, "num_experts_per_tok": EXPERTS, "moe_intermediate_size": 160}
GQA = Case(
    "qwen3_moe-fp8",
    "Qwen3Moe",
    _SIZES | {"num_key_value_heads": 2, "head_dim": 32, "num_experts": EXPERTS, "norm_topk_prob": True},
    scale=0.05,
    seed=151,
)
MLA = Case(
    "deepseek_v3-fp8",
    "DeepseekV3",
    _SIZES
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "n_routed_experts": EXPERTS,
        "intermediate_size": 192,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    scale=0.05,
    seed=25,
)


@dataclass(frozen=True)
class Fp8Tiny:
    """path: of codes. plain: of the same model as float32 values. tokens: COUNT of each of PROMPTS."""

    path: Path
    plain: Path
    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]


def make(case: Case, folder: Path) -> Fp8Tiny:
    """Tries seeds until every answer is far from a tie and has no token twice."""
    for seed in range(case.seed, case.seed + 1000):
        model = uneven(random_model(case, seed))
        if not _fair([_greedy(model, prompt) for prompt in PROMPTS]):
            continue
        raw, plain, path = (folder / f"{name}-{seed}" for name in ("raw", "plain", "fp8"))
        model.save_pretrained(raw)
        to_fp8(raw, path)
        widened(path, plain)
        model = case.model.from_pretrained(plain, dtype=torch.float32)
        answers = [_greedy(model, prompt) for prompt in PROMPTS]
        if _fair(answers):
            return Fp8Tiny(path, plain, PROMPTS, tuple(tokens for tokens, _ in answers))
    raise AssertionError(f"{case.name}: no seed gives a fair test")


def uneven(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The same with experts whose gate, up and columns differ in size: so no scale can stand for another."""
    with torch.no_grad():
        for name, values in model.named_parameters():
            if ".experts." in name:
                for part in values.chunk(2, dim=1) if "gate_up" in name else (values,):
                    for block in part.split(BLOCK[1], dim=2):
                        block.mul_(torch.empty(len(block), 1, 1).uniform_(0.3, 1.7))
    return model


def quantise(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> Codes:
    """Codes of a matrix; the largest magnitude of a block becomes 448."""
    rows, columns = weight.shape
    grid = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:rows, :columns] = weight
    tiles = padded.view(grid[0], block[0], grid[1], block[1])
    scale = tiles.abs().amax((1, 3)).clamp(min=1e-12) / E4M3_MAX
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return Codes(codes.view(padded.shape)[:rows, :columns].contiguous(), scale)


def to_fp8(
    source: Path,
    target: Path,
    block: tuple[int, int] = BLOCK,
    more: dict[str, torch.Tensor] | None = None,
) -> Path:
    """A checkpoint whose projections are codes. more: tensors beside them."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensors[name], block)
    save_file(tensors | (more or {}), target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    config["dtype"] = "bfloat16"
    (target / "config.json").write_text(json.dumps(config))
    return target


def widened(source: Path, target: Path, block: tuple[int, int] = BLOCK) -> Path:
    """The checkpoint of to_fp8() as float32 values."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = widen(tensors[weight], tensors.pop(name), block)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return target


def _fair(answers: list[tuple[tuple[int, ...], float]]) -> bool:
    return all(margin >= MARGIN and len(set(tokens)) == COUNT for tokens, margin in answers)


def _greedy(model: transformers.PreTrainedModel, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """COUNT ids and the smallest gap between the two best logits of any of them."""
    ids, gaps = list(prompt), []
    with torch.inference_mode():
        for _ in range(COUNT):
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
            ids.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
    return tuple(ids[len(prompt) :]), min(gaps)
