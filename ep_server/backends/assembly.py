"""Builds the model of one rank for the worker: reads the checkpoint, makes the KV cache and the runner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from ep_server.backends.cpu.native_compute import NativeCompute
from ep_server.backends.cpu.runner import ModelRunner, TokenSampler
from ep_server.backends.masks import Masks
from ep_server.backends.shadow import HostExperts
from ep_server.backends.torch_compute import TorchCompute
from ep_server.errors import ConfigError
from ep_server.exchange.api import Exchange
from ep_server.models.checkpoint import Checkpoint
from ep_server.models.compute import Compute
from ep_server.models.decoder import DecoderParams
from ep_server.models.dummy import DummyReader
from ep_server.models.experts import SlotMove, load_slots
from ep_server.models.families import ModelSpec, read_spec
from ep_server.models.footprint import footprint
from ep_server.models.identity import check_files
from ep_server.models.kv_cache import KvCache, Zeros
from ep_server.models.layers import ModelWeights
from ep_server.models.loading import PlainFiles, TensorFiles, TensorReader, TensorSource
from ep_server.models.moe import UniformRouting
from ep_server.models.sizes import Dtype, cache_dtype, context_limit, kv_block_bytes, serving_dtype
from ep_server.models.slots import Held, SlotTable
from ep_server.models.weights import (
    LayerExperts,
    Progress,
    load_weights,
    weights_from,
)
from ep_server.records import EMPTY

MOST_READERS = 16  # threads that read for a GPU: enough to keep its copy engine busy
MOST_LOADERS = 4  # threads that load into host memory
BATCH_BYTES = 64 << 20  # of experts that a thread reads for a GPU between two turns of the interpreter
LOADING_BYTES = 2 << 30  # of layers in the making, beside what is kept
TORCH = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FP8: torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class LoadParams:
    """What one rank loads.

    placement: [E] owner rank of each expert. dtype: "auto", "float32" or "bfloat16" (ModelConfig.dtype).
    max_context: longest sequence, tokens; 0 = the model's own limit. threads: of the compute kernels.
    compute: whose arithmetic to use; None = our CPU kernels. load_format, routing, seed, kv_dtype: as in
      ModelConfig.
    held: by layer, by slot of this rank: the expert, or EMPTY; None = those that `placement` gives it.
    version: of the weights. files: identity of their files, which must not hold others; "" = any.
    """

    path: str
    rank: int
    placement: tuple[int, ...]
    dtype: str = "auto"
    max_context: int = 0
    threads: int = 1
    compute: Compute | None = None
    load_format: str = "auto"
    routing: str = "router"
    seed: int = 0
    kv_dtype: str = "auto"
    held: Held | None = None
    version: int = 0
    files: str = ""

    def slots(self, spec: ModelSpec) -> list[SlotMove]:
        """What the slots of this rank hold in layers with experts."""
        own = [expert for expert, owner in enumerate(self.placement) if owner == self.rank]
        held = self.held or [own] * spec.num_layers
        return [
            SlotMove(layer, slot, expert)
            for layer, experts in enumerate(held)
            if spec.sparse_layers[layer]
            for slot, expert in enumerate(experts)
            if expert != EMPTY
        ]


@dataclass(frozen=True, slots=True)
class RankModel:
    """A loaded model, not yet connected to other ranks.

    kv_dtype: of the KV cache. uniform: None = its router chooses the experts.
    slots: where experts are, once it is set; None if they stay where LoadParams.placement has them.
    """

    spec: ModelSpec
    weights: ModelWeights
    dtype: Dtype
    kv_dtype: Dtype
    max_context: int
    compute: Compute
    uniform: UniformRouting | None = None
    slots: SlotTable | None = None

    def kv_block_bytes(self, block_size: int) -> int:
        """Memory of one KV block of this rank, bytes."""
        return kv_block_bytes(self.spec, block_size, self.kv_dtype)

    def runner(
        self,
        exchange: Exchange,
        sampler: TokenSampler,
        kv_blocks: int,
        block_size: int,
        masks: Masks | None = None,
        make: Zeros | None = None,
    ) -> ModelRunner:
        """Allocates the KV cache and joins the parts. masks: see ModelRunner. make: see KvCache."""
        cache = KvCache(self.spec, kv_blocks, block_size, TORCH[self.kv_dtype], self.compute.device, make)
        params = DecoderParams(
            self.spec,
            self.weights,
            exchange,
            cache,
            self.max_context,
            self.compute,
            self.uniform,
            self.slots,
        )
        return ModelRunner(params, sampler, masks)


def load_model(
    params: LoadParams,
    progress: Progress = lambda stage, done, total: None,
    shadow: HostExperts | None = None,
) -> RankModel:
    """Reads what a rank owns of a checkpoint.

    shadow: where experts come from that it holds already.
    Raises: CheckpointError; ConfigError where max_context or placement does not fit the model.
    """
    spec = read_spec(params.path)
    limit = context_limit(spec, params.max_context)
    if params.held is None and len(params.placement) != spec.router.num_experts:
        raise ConfigError(
            "placement", params.placement, f"one rank for each of {spec.router.num_experts} experts"
        )
    experts, number = experts_of(params)
    copied: list[SlotMove] = []
    if shadow is not None:
        copied = [one for one in params.slots(spec) if shadow.holds(params.version, one.layer, one.expert)]
        experts = _others(params, spec, copied)
    dtype = serving_dtype(spec, params.dtype)
    compute = params.compute or NativeCompute(params.threads)
    loaders = loading_threads(spec, dtype, number, params.threads)
    if compute.device.type == "cuda" and params.load_format != "dummy":
        loaders = min(params.threads, MOST_READERS)  # straight to the device: no layer is in host memory
    if params.load_format == "dummy":
        source = DummyReader(spec, params.seed, compute.device)
        weights = weights_from(source, spec, experts, TORCH[dtype], compute, progress, loaders)
    else:
        files = files_for(compute.device)
        with _unchanged(params) as checkpoint:
            weights = load_weights(checkpoint, spec, experts, TORCH[dtype], compute, progress, loaders, files)
    uniform = None
    if params.routing != "router":
        exponent = 1.0 if params.routing == "zipf" else 0.0
        uniform = UniformRouting(spec.router, params.seed, compute.device, exponent)
    kv_dtype = cache_dtype(dtype, params.kv_dtype)
    slots = None
    if params.held is not None:
        slots = SlotTable(spec.num_layers, spec.router.num_experts, compute.device)
    model = RankModel(spec, weights, dtype, kv_dtype, limit, compute, uniform, slots)
    if copied:
        load_experts(model, params, copied, shadow)
    return model


def experts_of(params: LoadParams) -> tuple[Sequence[int] | LayerExperts, int]:
    """What load_weights() takes, and the experts of a layer that a rank holds at most."""
    if params.held is None:
        own = [e for e, owner in enumerate(params.placement) if owner == params.rank]
        return own, len(own)
    return params.held.__getitem__, max(sum(e != EMPTY for e in layer) for layer in params.held)


def _others(params: LoadParams, spec: ModelSpec, copied: Sequence[SlotMove]) -> LayerExperts:
    """The slots of each layer without those that are copied."""
    own = [expert for expert, owner in enumerate(params.placement) if owner == params.rank]
    held = [list(layer) for layer in params.held or [own] * spec.num_layers]
    for one in copied:
        held[one.layer][one.slot] = EMPTY
    return held.__getitem__


def load_experts(
    model: RankModel,
    params: LoadParams,
    moves: Sequence[SlotMove],
    shadow: HostExperts | None = None,
    alive: Callable[[], None] = lambda: None,
) -> int:
    """Reads experts into slots that no rows are for meanwhile, in several threads.

    params: as the model was loaded, or of newer weights in force. shadow: as in load_model().
    alive: called in this thread now and then, but for those that the shadow has.
    Returns: how many the shadow had. Raises: CheckpointError, InternalError.
    """
    moves = [move for move in moves if model.spec.sparse_layers[move.layer]]
    rest = moves if shadow is None else shadow.load(model.weights, moves, params.version)
    if not rest:
        return len(moves)
    dtype, compute = TORCH[model.dtype], model.compute
    threads, batch = loading_threads(model.spec, model.dtype, 1, params.threads), 0
    if compute.device.type == "cuda" and params.load_format != "dummy":  # straight to where they belong
        threads, batch = min(params.threads, MOST_READERS), BATCH_BYTES
    with source_of(params, model.spec, compute.device) as source:
        load_slots(source, model.spec, dtype, compute, model.weights, rest, threads, alive, batch)
    return len(moves) - len(rest)


@contextmanager
def source_of(
    params: LoadParams, spec: ModelSpec, device: torch.device, opened: Checkpoint | None = None
) -> Iterator[TensorSource]:
    """Where weights come from. At its end all values that were read are where they belong.

    opened: the checkpoint, to be read beside steps: in the order of the current stream, and without giving
        device memory back, which would wait for the steps.
    Raises: CheckpointError.
    """
    if params.load_format == "dummy":
        yield DummyReader(spec, params.seed, device)
        return
    with (
        _unchanged(params, opened) as checkpoint,
        files_for(device, beside=opened is not None) as files,
    ):
        yield TensorReader(checkpoint, spec.quant_block, files)
        files.finish()


@contextmanager
def _unchanged(params: LoadParams, opened: Checkpoint | None = None) -> Iterator[Checkpoint]:
    """The checkpoint. Raises: ConfigError if its files hold other weights than they shall; CheckpointError.

    That is looked at before they are read too, but for one that is open: each look is a call per shard.
    """
    checkpoint = opened or Checkpoint.open(params.path)
    if opened is None:
        check_files(checkpoint, params.files)
    yield checkpoint
    check_files(checkpoint, params.files)


def in_host_memory(compute: Compute) -> Compute:
    """Prepares weights as `compute` does, but in host memory."""
    return compute if compute.device.type == "cpu" else TorchCompute()


def files_for(device: torch.device, *, beside: bool = False) -> AbstractContextManager[TensorFiles]:
    """Plain files for the CPU; pinned staging buffers for a GPU. beside: steps that run."""
    if device.type != "cuda":
        return PlainFiles(device)
    from ep_server.backends.gpu.staged_files import StagedFiles, StreamCopies

    return StagedFiles(StreamCopies(device, keeps=beside))


def loading_threads(spec: ModelSpec, dtype: Dtype, experts: int, threads: int) -> int:
    """How many of `threads` load a layer each, so that the layers in the making stay small beside the model.

    Args:
        experts: of a layer that this rank owns.
    """
    values = dataclasses.replace(spec, quant_block=None)  # what is FP8 may be widened in between
    layer = footprint(values, dtype, packed=False).expert * max(experts, 1)
    return max(1, min(threads, MOST_LOADERS, LOADING_BYTES // layer))
