"""Builds one rank's model: checkpoint to spec, weights, KV cache, runner. What the worker calls.

Knows all parts of model/; knows nothing of processes, schedulers or how the exchange was made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.ep.exchange import Exchange, Payload
from ep_server.errors import ConfigError
from ep_server.model.checkpoint import Checkpoint
from ep_server.model.compute import Compute
from ep_server.model.decoder import DecoderParams
from ep_server.model.families import ModelSpec, read_spec
from ep_server.model.kv_cache import KvCache, kv_block_bytes
from ep_server.model.layers import ModelWeights
from ep_server.model.native_compute import NativeCompute
from ep_server.model.runner import ModelRunner, TokenSampler
from ep_server.model.weights import Progress, load_weights


@dataclass(frozen=True, slots=True)
class LoadParams:
    """What one rank loads.

    placement: [E] owner rank of each expert. dtype: "auto", "float32" or "bfloat16" (ModelConfig.dtype).
    max_context: longest sequence, tokens; 0 = the model's own limit. threads: of the compute kernels.
    compute: whose arithmetic to use; None = our CPU kernels.
    """

    path: str
    rank: int
    placement: tuple[int, ...]
    dtype: str = "auto"
    max_context: int = 0
    threads: int = 1
    compute: Compute | None = None


@dataclass(frozen=True, slots=True)
class RankModel:
    """A loaded model, not yet connected to other ranks."""

    spec: ModelSpec
    weights: ModelWeights
    dtype: torch.dtype
    max_context: int
    compute: Compute

    def payload(self, choice: str) -> Payload:
        """The exchange payload for ExchangeConfig.payload; "auto" is the model's dtype."""
        if choice == "auto":
            return Payload.FP32 if self.dtype is torch.float32 else Payload.BF16
        return Payload(choice)

    def kv_block_bytes(self, block_size: int) -> int:
        """Memory of one KV block of this rank, bytes."""
        return kv_block_bytes(self.spec, block_size, self.dtype)

    def runner(
        self, exchange: Exchange, sampler: TokenSampler, kv_blocks: int, block_size: int
    ) -> ModelRunner:
        """Allocates the KV cache and joins the parts."""
        cache = KvCache(self.spec, kv_blocks, block_size, self.dtype)
        params = DecoderParams(self.spec, self.weights, exchange, cache, self.max_context, self.compute)
        return ModelRunner(params, sampler)


def load_model(params: LoadParams, progress: Progress = lambda stage, done, total: None) -> RankModel:
    """Reads what a rank owns of a checkpoint.

    Raises: CheckpointError; ConfigError where max_context or placement does not fit the model.
    """
    spec = read_spec(params.path)
    limit = context_limit(spec, params.max_context)
    if len(params.placement) != spec.router.num_experts:
        raise ConfigError(
            "placement", params.placement, f"one rank for each of {spec.router.num_experts} experts"
        )
    experts = [e for e, owner in enumerate(params.placement) if owner == params.rank]
    dtype = serving_dtype(spec, params.dtype)
    compute = params.compute or NativeCompute(params.threads)
    weights = load_weights(Checkpoint.open(params.path), spec, experts, dtype, compute, progress)
    return RankModel(spec, weights, dtype, limit, compute)


def context_limit(spec: ModelSpec, max_context: int) -> int:
    """ModelConfig.max_context resolved, tokens. Raises: ConfigError above the model's own limit."""
    if max_context > spec.max_context:
        raise ConfigError("model.max_context", max_context, f"at most the model's {spec.max_context}")
    return max_context or spec.max_context


def serving_dtype(spec: ModelSpec, choice: str) -> torch.dtype:
    """ModelConfig.dtype resolved: "auto" is the checkpoint's own, float32 for float16."""
    name = spec.dtype if choice == "auto" else choice
    return torch.bfloat16 if name == "bfloat16" else torch.float32
