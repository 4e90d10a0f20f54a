"""Steps of a model with shared experts, and the logits that they give."""

from __future__ import annotations

from typing import Any

import torch

from ep_server.backends.gpu.runner import GpuRunner
from ep_server.records import SeqSlice, StepBatch
from tests.support.gpu.watched import CONTEXT
from tests.support.models.driver import BLOCK
from tests.support.ranks.rank_group import greedy

ROWS, VOCAB, LAYERS = 8, 3000, 4  # the first layer is dense
SPARSE = LAYERS - 1


def config(hidden: int, ffn: int, experts: int, latent: int) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": VOCAB,
        "hidden_size": hidden, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": latent, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": experts, "n_shared_experts": 2,
        "num_experts_per_tok": 3, "moe_intermediate_size": ffn, "intermediate_size": 96,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "attention_bias": False, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip


def step(position: int) -> StepBatch:
    """One token of every sequence, another one at every position."""
    held = CONTEXT // BLOCK
    pieces = [
        SeqSlice(n, position, ((31 * position + 7 * n) % VOCAB,), range(held * n, held * (n + 1)), True)
        for n in range(ROWS)
    ]
    return StepBatch(tuple(pieces), ROWS)


def logits_of(runner: GpuRunner, steps: int, bucket: int = 0) -> torch.Tensor:
    """[steps, ROWS, VOCAB] of steps from the first position on; bucket: see GpuRunner.launch."""
    found = []
    for n in range(ROWS):
        runner.add(greedy(n, (0,), steps))
    with torch.inference_mode():
        for position in range(steps):
            runner.collect(runner.launch(step(position), 1, bucket))
            found.append(runner._logits[:ROWS].clone())
    for n in range(ROWS):
        runner.remove(n)
    return torch.stack(found)
