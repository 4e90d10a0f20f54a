"""Writes a random Qwen3-MoE checkpoint of a given shape with transformers. Knows nothing of the server.

The default shape is that of bench_decode.py: 114 M parameters, of which a token reads 22 M (44 MB in
bfloat16). Weights are scaled so that greedy output is varied and top-2 margins are far above the rounding
of float32.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3-MoE model, in elements."""

    hidden: int = 512
    layers: int = 8
    experts: int = 32
    top_k: int = 4
    expert_ffn: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 8192
    max_context: int = 4096

    @property
    def attention_weights(self) -> int:
        """Elements of q, k, v and o of one layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Elements of gate, up and down of one expert."""
        return 3 * self.hidden * self.expert_ffn

    def parameters(self) -> int:
        """Elements of all weight matrices, embedding and head included (untied)."""
        layer = self.attention_weights + self.experts * (self.expert_weights + self.hidden)
        return self.layers * layer + 2 * self.vocabulary * self.hidden

    def read_per_step(self, experts_used: float) -> float:
        """Weight elements that one decode step must read when a layer uses that many distinct experts."""
        layer = self.attention_weights + self.experts * self.hidden + experts_used * self.expert_weights
        return self.layers * layer + self.vocabulary * self.hidden

    def expected_experts(self, batch: int) -> float:
        """Distinct experts of a layer that `batch` tokens use, if routing is uniform and independent."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** batch)


def make_checkpoint(directory: Path, shape: Shape | None = None, seed: int = 0) -> None:
    """Writes config.json and bfloat16 safetensors into `directory`, which is created.

    Args:
        shape: sizes; the default Shape if None.
        seed: of the weights; the same seed gives the same bytes.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = shape or Shape()
    config = Qwen3MoeConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.expert_ffn,
        intermediate_size=2 * shape.hidden,
        max_position_embeddings=shape.max_context,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=shape.vocabulary - 1,
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                # Unit variance through every matrix; the router sharper, so that choices are clear.
                gain = 2.0 if name.endswith("mlp.gate.weight") else 1.0
                scale = gain * weight.shape[-1] ** -0.5 if "embed_tokens" not in name else 1.0
                weight.normal_(0.0, scale)
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_checkpoint(arguments.directory, seed=arguments.seed)
    print(f"{arguments.directory}: {Shape().parameters() / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
