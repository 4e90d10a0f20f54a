"""Writes a random Qwen3-MoE checkpoint of a given shape. Knows nothing of the server, and needs only torch
and safetensors.

The default shape is that of bench_decode.py: 114 M parameters, of which a token reads 22 M (44 MB in
bfloat16). Weights are scaled so that greedy output is varied and top-2 margins are far above the rounding
of float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and sizes of every tensor of a checkpoint."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            found |= {f"{at}.self_attn.{name}_proj.weight": (narrow, self.hidden) for name in "kv"}
            found |= {f"{at}.self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
            found[f"{at}.self_attn.q_proj.weight"] = wide, self.hidden
            found[f"{at}.self_attn.o_proj.weight"] = self.hidden, wide
            found[f"{at}.input_layernorm.weight"] = found[f"{at}.post_attention_layernorm.weight"] = (
                self.hidden,
            )
            found[f"{at}.mlp.gate.weight"] = self.experts, self.hidden
            for expert in range(self.experts):
                each = f"{at}.mlp.experts.{expert}"
                found[f"{each}.gate_proj.weight"] = found[f"{each}.up_proj.weight"] = (
                    self.expert_ffn,
                    self.hidden,
                )
                found[f"{each}.down_proj.weight"] = self.hidden, self.expert_ffn
        return {
            **found,
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocabulary, self.hidden),
        }

    def config(self) -> dict[str, Any]:
        """config.json, in the names of transformers."""
        return {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_ffn,
            "intermediate_size": 2 * self.hidden,
            "max_position_embeddings": self.max_context,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "bos_token_id": None,
            "eos_token_id": self.vocabulary - 1,
        }

    def expected_experts(self, batch: int) -> float:
        """Distinct experts of a layer that `batch` tokens use, if routing is uniform and independent."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** batch)


def make_checkpoint(directory: Path, shape: Shape | None = None, seed: int = 0) -> None:
    """Writes config.json, a tokenizer and bfloat16 safetensors into `directory`, which is created.

    Args:
        shape: sizes; the default Shape if None.
        seed: of the weights; the same seed gives the same bytes.
    """
    import torch
    from safetensors.torch import save_file

    shape = shape or Shape()
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        # Unit variance through every matrix; the router sharper, so that choices are clear.
        gain = 2.0 if name.endswith("mlp.gate.weight") else 1.0
        scale = gain * size[-1] ** -0.5 if "embed_tokens" not in name else 1.0
        return torch.empty(size).normal_(0.0, scale, generator=generator).to(torch.bfloat16)

    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: drawn(name, size) for name, size in shape.tensors().items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer(shape.vocabulary)))
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=2))  # last: it is complete


def tokenizer(vocabulary: int) -> dict[str, Any]:
    """Byte-level BPE: every byte, then pairs of bytes, then the end of a text; `vocabulary` tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + number) for number in range(len(others)))]
    pairs = list(itertools.islice(itertools.product(characters, repeat=2), vocabulary - 257))
    tokens = [*characters, *map("".join, pairs)]
    plain = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": vocabulary - 1, "content": "<eos>", "special": True, **flags}],
        "pre_tokenizer": {"type": "ByteLevel", **plain},
        "decoder": {"type": "ByteLevel", **plain},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [list(pair) for pair in pairs],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_checkpoint(arguments.directory, seed=arguments.seed)
    print(f"{arguments.directory}: {Shape().parameters() / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
