"""Joins a loaded model, an exchange and a KV cache to a GpuRunner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_server.backends.assembly import TORCH, RankModel
from ep_server.backends.gpu.attention.choice import AttentionCase, Chosen, choose
from ep_server.backends.gpu.attention.decode_kernels import DecodeKernels
from ep_server.backends.gpu.capability import sm_count
from ep_server.backends.gpu.chunk_copies import CopyRule
from ep_server.backends.gpu.expansion import Expansion
from ep_server.backends.gpu.graphs import GraphKey, captured_keys
from ep_server.backends.gpu.kernels.triton.expand import TILE
from ep_server.backends.gpu.layer_progress import DeviceProgress
from ep_server.backends.gpu.memory import Room
from ep_server.backends.gpu.moe.rows import RowsOfSteps
from ep_server.backends.gpu.runner import GpuOptions, GpuRunner
from ep_server.backends.gpu.step_input import InputShape
from ep_server.backends.gpu.widening import Widening
from ep_server.backends.masks import Masks
from ep_server.exchange.api import Exchange
from ep_server.models.decoder import DecoderParams
from ep_server.models.families.spec import GqaSpec
from ep_server.models.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """Sizes of one rank. kv_blocks: 0 = what the device's memory allows. graphs: capture steps.

    overlap: on, off or auto; whether steps of two micro-batches are captured too.
    timed_every: of so many steps the phases of one are timed on the device; 0 = none.
    layer_progress: the cache tells which layers a prompt's step has written.
    step_bytes: that a step needs for its exchange, beside what that holds.
    copies: see Chosen.
    """

    kv_blocks: int
    block_size: int
    max_running: int
    max_step_tokens: int
    useful_blocks: int
    graphs: bool = True
    overlap: str = "off"
    timed_every: int = 0
    layer_progress: bool = False
    step_bytes: int = 0
    copies: bool = False


def kv_blocks_on(device: torch.device, model: RankModel, plan: GpuPlan) -> int:
    """KV blocks of this rank. Raises: StartupError with the numbers if they do not fit."""
    if device.type != "cuda":
        return plan.kv_blocks or plan.useful_blocks
    block, rule = model.kv_block_bytes(plan.block_size), copy_rule_of(model, plan)
    asked, weights = (plan.kv_blocks, plan.useful_blocks), model.weights.nbytes
    copies = 0 if rule is None else rule.nbytes
    return Room.on(device).kv_blocks(block, *asked, weights, plan.step_bytes, copies)


def copy_rule_of(model: RankModel, plan: GpuPlan) -> CopyRule | None:
    """Room for the longest context and a whole step of other prompts; None if no step attends to a copy."""
    spec, sms = model.spec.attention, sm_count(model.compute.device)
    if not plan.copies:
        return None
    most = (plan.kv_blocks or plan.useful_blocks) * plan.block_size
    size = plan.block_size if isinstance(spec, GqaSpec) else TILE
    wanted = sum(-(-tokens // size) for tokens in (model.max_context, plan.max_step_tokens))
    wanted = min(wanted, -(-most // size))
    if isinstance(spec, GqaSpec):
        return Widening.of(spec, size, wanted, sms)
    return Expansion.of(spec, plan.block_size, wanted, sms)


def decode_kernels(asked: str, model: RankModel, block_size: int) -> Chosen:
    """Attention kernels, compiled before any capture. asked: ModelConfig.attention. Raises: ConfigError."""
    dtypes = (model.dtype, model.kv_dtype)
    case = AttentionCase.on(model.compute.device, model.spec.attention, dtypes, block_size, model.max_context)
    return choose(asked, case)


def gpu_runner(
    model: RankModel,
    exchange: Exchange,
    rows: RowsOfSteps,
    plan: GpuPlan,
    kv_blocks: int,
    kernels: DecodeKernels | None = None,
    masks: Masks | None = None,
) -> GpuRunner:
    """Allocates what steps need on the model's device; no graph is captured yet.

    kernels: see GpuOptions. masks: of requests with a grammar.
    """
    device = model.compute.device
    cache = KvCache(model.spec, kv_blocks, plan.block_size, TORCH[model.kv_dtype], device)
    if plan.layer_progress:
        cache.progress = DeviceProgress(device, len(cache.layers))
    params = DecoderParams(
        model.spec,
        model.weights,
        exchange,
        cache,
        model.max_context,
        model.compute,
        model.uniform,
        model.slots,
    )
    sequences = min(plan.max_running, plan.max_step_tokens)
    longest = -(-model.max_context // plan.block_size)
    shape = InputShape(plan.max_step_tokens, sequences, longest, plan.block_size)
    keys: list[GraphKey] = []
    if plan.graphs:
        timed = plan.timed_every > 0
        most = plan.max_step_tokens
        keys = captured_keys(sequences, most, plan.overlap, timed=timed, copies=plan.copies)
    rule = copy_rule_of(model, plan)
    options = GpuOptions(shape, rows, tuple(keys), plan.timed_every, kernels, rule)
    return GpuRunner(params, options, masks)
