"""What a model is, as frozen records: shapes, router rules, rope, sparse layers, tensor names.

One file per family builds it from config.json; the loader, the decoder and `inspect` read it.
Units: channels, tokens, experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FP8_BLOCK = 128  # rows and columns of an expert's weight that share a scale where it stays FP8


class QkNorm(StrEnum):
    """Which RMS norm queries and keys get before rope."""

    NONE = "none"
    HEAD = "head"  # over each head's channels, one [head_dim] weight for all heads
    FULL = "full"  # over the whole q (k) width


class RopeType(StrEnum):
    """How rope frequencies are scaled beyond the pretraining context."""

    DEFAULT = "default"
    LINEAR = "linear"
    YARN = "yarn"


class Score(StrEnum):
    """How router logits become scores, always in float32."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(StrEnum):
    """What ranks the expert groups of a group-limited router."""

    MAX = "max"  # best expert of the group
    TOP2_SUM = "top2_sum"  # sum of the two best, correction bias included


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of `dim` channels.

    interleaved: pairs are channels (2i, 2i + 1); otherwise (i, i + dim / 2).
    attention_factor: scale of cos and sin (yarn). The other fields are read by their type only.
    """

    dim: int
    theta: float
    interleaved: bool = False
    type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Grouped-query attention. window 0 = full context; clip 0 = no clamp of q, k and v."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qk_norm: QkNorm = QkNorm.NONE
    bias: bool = False
    window: int = 0
    clip: float = 0.0

    @property
    def kv_values_per_token(self) -> int:
        """Elements one token adds to one layer's KV cache."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention. q_lora 0 = queries are projected directly.

    kv_lora: channels of the compressed latent that is cached, next to rope_dim channels of shared key.
    bias: of the two down projections and the output projection.
    """

    heads: int
    q_lora: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    bias: bool = False
    norm_eps: float = 1e-6  # of the two latent norms; the released models do not read it from rms_norm_eps

    @property
    def kv_values_per_token(self) -> int:
        """Elements one token adds to one layer's KV cache."""
        return self.kv_lora + self.rope_dim


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The router's order of operations: score, + bias, limit to groups, top-k, gather, renorm, scale.

    bias: a per-expert correction is added for the choice, never to the weight.
    groups 1 = no group limit; otherwise the best `top_groups` of `groups` equal groups stay.
    renorm_eps: added to the sum that weights are divided by, when `renormalise`.
    """

    num_experts: int
    top_k: int
    score: Score = Score.SOFTMAX
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = GroupScore.MAX
    renormalise: bool = False
    renorm_eps: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MoeNames:
    """Names of a sparse block's tensors, below `model.layers.<i>.`.

    blocks: candidate prefixes, the first that the checkpoint has is taken.
    """

    blocks: tuple[str, ...] = ("mlp",)
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model. `sparse_layers[i]` says whether layer i is a mixture of experts or a dense FFN.

    expert_ffn, dense_ffn: intermediate channels. shared_ffn: of all shared experts as one FFN, 0 = none.
    tied_head: the head is the embedding.
    dtype: of the checkpoint's weights: float32, bfloat16 or float16; None = neither config.json nor a tensor
      says it.
    quant_block: rows and columns of one FP8 weight scale; None = not quantised.
    """

    family: str
    vocab_size: int
    hidden: int
    max_context: int
    norm_eps: float
    tied_head: bool
    attention: GqaSpec | MlaSpec
    rope: RopeSpec
    router: RouterSpec
    sparse_layers: tuple[bool, ...]
    expert_ffn: int
    dense_ffn: int = 0
    shared_ffn: int = 0
    names: MoeNames = MoeNames()
    dtype: str | None = None
    quant_block: tuple[int, int] | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.sparse_layers)

    @property
    def fp8_blocks(self) -> bool:
        """FP8 in the blocks that GPU ranks multiply with as they are; others are widened at load."""
        return self.quant_block == (FP8_BLOCK, FP8_BLOCK)

    @property
    def kv_values_per_token(self) -> int:
        """Elements one token adds to the whole KV cache of its rank."""
        return self.num_layers * self.attention.kv_values_per_token
