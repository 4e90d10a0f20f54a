"""How long one decode step of a model takes: a roofline for compute, and the exchange beside it.

Attention is data-parallel: each rank has its own sequences and reads all attention weights; experts are
spread over the ranks. Compute is the larger of bytes / memory rate and operations / arithmetic rate for each
of attention, experts and the rest: a bound that good kernels come close to, without launches or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fabric_times import Machine, Times, our_wire, pair
from fabric_traffic import Case


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a Mixture-of-Experts decoder.

    attention: weights of one layer's attention. kv_bytes: of one token in one layer. score_ops: operations of
      one query token with one cached token in one layer. expert_bytes, other_bytes: of one weight.
    fp8: the wire of dispatch. groups, kept: see Case.
    """

    name: str
    layers: int
    dense_layers: int
    hidden: int
    experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int
    dense_ffn: int
    vocabulary: int
    attention: int
    kv_bytes: int
    score_ops: int
    expert_bytes: int
    other_bytes: int
    fp8: bool
    groups: int = 1
    kept: int = 1

    @property
    def expert(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.expert_ffn

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers


# Latent attention: down and up projections of queries (1536) and keys/values (512 + 64), 128 heads of 128.
DEEPSEEK_V3 = Model(
    name="DeepSeek-V3",
    layers=61,
    dense_layers=3,
    hidden=7168,
    experts=256,
    top_k=8,
    expert_ffn=2048,
    shared_ffn=2048,
    dense_ffn=18432,
    vocabulary=129280,
    attention=7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168,
    kv_bytes=2 * (512 + 64),
    score_ops=2 * 128 * (512 + 64 + 512),
    expert_bytes=1,
    other_bytes=1,
    fp8=True,
    groups=8,
    kept=4,
)
# 32 query and 4 key/value heads of 128.
QWEN3_30B = Model(
    name="Qwen3-30B-A3B",
    layers=48,
    dense_layers=0,
    hidden=2048,
    experts=128,
    top_k=8,
    expert_ffn=768,
    shared_ffn=0,
    dense_ffn=0,
    vocabulary=151936,
    attention=2 * 2048 * 128 * (32 + 4),
    kv_bytes=2 * 2 * 4 * 128,
    score_ops=2 * 32 * (128 + 128),
    expert_bytes=2,
    other_bytes=2,
    fp8=False,
)
MODELS = {model.name: model for model in (DEEPSEEK_V3, QWEN3_30B)}


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory_gbs: as kernels reach it, of an H200's 4,800. tflops: BF16, 60 % of 989; FP8 is twice that."""

    memory_gbs: float = 4500.0
    tflops: float = 593.0


@dataclass(frozen=True, slots=True)
class Layer:
    """us of one layer's compute on a rank, and its dispatch and combine."""

    compute: float
    exchange: tuple[Times, Times]


@dataclass(frozen=True, slots=True)
class Step:
    """us of one step without and with overlap. exchange_us: of it in dispatch and combine, without."""

    off_us: float
    on_us: float
    exchange_us: float
    tokens: int

    @property
    def best_us(self) -> float:
        """With overlap only where it helps: overlap = auto."""
        return min(self.off_us, self.on_us)

    @property
    def tokens_per_second(self) -> float:
        """One token a sequence and step."""
        return self.tokens / self.best_us * 1e6


class Roofline:
    """Compute of one rank of a group that runs `model`; us."""

    def __init__(self, model: Model, gpu: Gpu, case: Case, context: int) -> None:
        self.model, self.gpu, self.case, self.context = model, gpu, case, context

    def moe_layer(self, tokens: int) -> float:
        """Attention, router, the experts of this rank for what all ranks send, the shared expert."""
        return self.attention(tokens) + self.experts(tokens) + self.ffn(self.model.shared_ffn, tokens)

    def dense_layer(self, tokens: int) -> float:
        """A layer whose FFN every rank has."""
        return self.attention(tokens) + self.ffn(self.model.dense_ffn, tokens)

    def head(self, tokens: int) -> float:
        """Logits, in BF16."""
        weights = self.model.hidden * self.model.vocabulary
        return self._larger(2 * weights, 2 * weights * tokens, 2)

    def attention(self, tokens: int) -> float:
        """Projections, and the cache of `context` tokens of every sequence; scores are BF16."""
        model, cached = self.model, tokens * self.context
        projections = self._larger(
            model.attention * model.other_bytes, 2 * model.attention * tokens, model.other_bytes
        )
        return projections + self._larger(cached * model.kv_bytes, cached * model.score_ops, 2)

    def experts(self, tokens: int) -> float:
        """An expert is read once if any token of the group chose it."""
        model, everyone = self.model, tokens * self.case.ranks
        local = self.case.physical / self.case.ranks
        rows = everyone * model.top_k / self.case.ranks
        hit = 1 - (1 - model.top_k / self.case.physical) ** everyone
        return self._larger(
            local * hit * model.expert * model.expert_bytes, 2 * rows * model.expert, model.expert_bytes
        )

    def ffn(self, width: int, tokens: int) -> float:
        """A gated FFN that every rank has."""
        weights, size = 3 * self.model.hidden * width, self.model.other_bytes
        return self._larger(weights * size, 2 * weights * tokens, size)

    def _larger(self, read: float, ops: float, weight_bytes: int) -> float:
        rate = self.gpu.tflops * (2 if weight_bytes == 1 else 1)
        return max(read / self.gpu.memory_gbs / 1e3, ops / rate / 1e6)


def case_of(model: Model, case: Case) -> Case:
    """The same group and tokens with this model's sizes."""
    sizes = {"hidden": model.hidden, "experts": model.experts, "top_k": model.top_k}
    return replace(case, **sizes, groups=model.groups, kept=model.kept)


def step(model: Model, case: Case, machine: Machine, *, gpu: Gpu | None = None, context: int = 4096) -> Step:
    """One step of case.tokens sequences a rank, each with `context` cached tokens. Sizes are the model's."""
    case = case_of(model, case)
    roofline = Roofline(model, gpu or Gpu(), case, context)
    rest = model.dense_layers * roofline.dense_layer(case.tokens) + roofline.head(case.tokens)
    whole = _layer(roofline, case, machine)
    exchange = whole.exchange[0].total + whole.exchange[1].total
    off = rest + model.moe_layers * (whole.compute + exchange)
    if case.tokens == 1:
        return Step(off, off, model.moe_layers * exchange, case.tokens)
    half = _layer(roofline, replace(case, tokens=-(-case.tokens // 2)), machine)
    return Step(off, rest + model.moe_layers * overlapped(half), model.moe_layers * exchange, case.tokens)


def _layer(roofline: Roofline, case: Case, machine: Machine) -> Layer:
    wire = our_wire(case, fp8=roofline.model.fp8)
    return Layer(roofline.moe_layer(case.tokens), pair(case, machine, wire))


def overlapped(half: Layer) -> float:
    """us of a layer in which two half batches take turns: compute of one beside the exchange of the other.

    Weights are read once per half. The longest of: both computes, both exchanges' time on links, one chain.
    """
    dispatch, combine = half.exchange
    total = dispatch.total + combine.total
    links = total - dispatch.fixed - combine.fixed
    return max(2 * half.compute, 2 * links, half.compute + total)
