"""[6] The Hopper kernel for attention with one token per sequence (csrc/kernels/hopper/attention).

One kernel does the per-head norm, the rotation, the cache write and attention. It accepts the projections
directly, also as partial sums. Its warps load keys and values ahead of their use. Other rows, caches and
devices use store_gqa() and decode() of kernels/triton, which also define the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ep_server.backends.gpu.capability import native, runs_hopper_kernels
from ep_server.backends.gpu.kernels.hopper.shares import ContextShares
from ep_server.backends.gpu.kernels.triton.launch import expect
from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.backends.gpu.kernels.triton.partial import Partial, operand
from ep_server.backends.gpu.kernels.triton.rope import HeadNorm
from ep_server.backends.gpu.step_input import StepTensors
from ep_server.errors import InternalError
from ep_server.models.families.spec import GqaSpec

_DIM, _MOST_GROUP, _LEAST_BLOCK, _PIECE = 128, 8, 16, 16
_TILE = 16  # positions
_WARPS = 8  # per block


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The configuration of a launch.

    team: warps that process a (share of a context, KV head): 1, 2, 4 or 8 (the whole block). blocks: upper
    bound, one per multiprocessor. least: positions that a share should have; some have a quarter less.
    """

    team: int
    blocks: int
    least: int = 512

    @property
    def teams(self) -> int:
        """That work at the same time."""
        return self.blocks * (_WARPS // self.team)


class HopperAttentionStep:
    """The state that all layers of a step share for its single tokens, which are its first rows."""

    def __init__(self, step: StepTensors, spec: GqaSpec, config: LaunchConfig) -> None:
        """Enqueues the cuts of contexts on the current stream; can be captured.

        HopperAttention reads them before the kernel ahead of it has ended. So a kernel that waits for its
        predecessors before it lets the next one start must lie between, as a projection does.

        Args:
            config: see launch_config_for().
        Raises: InternalError for another shape, dtype or layout.
        """
        count = self.count = len(step.singles)
        blocks, slots, lengths = step.blocks[:count], step.singles.slots, step.singles.lengths
        for name, each in (("slots", slots), ("lengths", lengths)):
            expect(name, each, torch.int32, (count,))
        expect("blocks", blocks, torch.int32, (count, None), pitch=True)
        module, kv_heads = native(), spec.kv_heads
        self.shares = ContextShares(
            lengths,
            slots,
            kv_heads=kv_heads,
            group=spec.heads // kv_heads,
            dim=_DIM,
            teams=config.teams,
            tile=_TILE,
            least=-(-config.least // _TILE),
        )
        self.work = module.AttentionWork(
            count=count,
            shares=self.shares.native,
            blocks=blocks.data_ptr(),
            blocks_pitch=blocks.stride(0),
            sums=self.shares.sums.data_ptr(),
            stats=self.shares.stats.data_ptr(),
        )
        self.native_config = module.AttentionLaunchConfig(team=config.team, blocks=config.blocks)
        self._held = step  # keeps its tensors alive


class HopperAttention:
    """One layer, on any stream.

    Args:
        kv, spec: as hopper_attention_fits() says. table: of a Rotation, interleaved. norm: of q and k.
    Raises: InternalError for another shape, dtype or layout.
    """

    def __init__(self, kv: PagedKv, spec: GqaSpec, table: torch.Tensor, norm: HeadNorm | None) -> None:
        k, v, obstacle = kv.layer.k, kv.layer.v, shape_obstacle(spec, kv.block_size)
        if v is None or obstacle:
            raise InternalError(f"attention for Hopper: {obstacle or 'the cache has no v'}")
        for name, each in (("cache k", k), ("cache v", v)):
            expect(name, each, torch.bfloat16, (len(k), kv.block_size, spec.kv_heads, _DIM))
        expect("rotation table", table, torch.float32, (None, _DIM // 2, 2))
        read = {"cache k": k, "cache v": v, "rotation table": table}
        if norm is not None:
            expect("norm weight", norm.weight, torch.bfloat16, (spec.heads + spec.kv_heads, _DIM))
            read["norm weight"] = norm.weight
        for name, each in read.items():
            if each.device != k.device or each.data_ptr() % _PIECE:
                raise InternalError(f"{name}: on {each.device}, must be 16-byte aligned on {k.device}")
        self._spec, self._held = spec, (k, v, table, norm)
        self._native: Any = native().Attention(
            device=k.device.index,
            k=k.data_ptr(),
            v=v.data_ptr(),
            positions=k.shape[0] * k.shape[1],
            kv_heads=spec.kv_heads,
            group=spec.heads // spec.kv_heads,
            block_size=kv.block_size,
            norm=0 if norm is None else norm.weight.data_ptr(),
            turns=table.data_ptr(),
            eps=0.0 if norm is None else norm.eps,
            scale=spec.scale,
        )

    def run(self, qkv: torch.Tensor | Partial, step: HopperAttentionStep, out: torch.Tensor) -> None:
        """Stores the tokens' keys and values, and attends. Runs on the current stream; can be captured.

        Args:
            qkv: [S, (heads + 2 * kv_heads) * 128] bfloat16, rows may have a pitch, or its partial sums.
            out: [S, heads, 128] bfloat16, contiguous; zeros for sequences of length 0.
        Raises: InternalError for another shape, dtype or layout.
        """
        s = self._spec
        given = operand("qkv", qkv, torch.bfloat16, (step.count, (s.heads + 2 * s.kv_heads) * _DIM))
        expect("out", out, torch.bfloat16, (step.count, s.heads, _DIM))
        rows = given.rows
        pitch = rows.stride(0) * rows.element_size()
        if any(size % _PIECE for size in (rows.data_ptr(), pitch, out.data_ptr())):
            raise InternalError(f"qkv, out: must be 16-byte aligned; {pitch} bytes from row to row of qkv")
        self._native.run(
            stream=torch.cuda.current_stream(out.device).cuda_stream,
            step=step.work,
            config=step.native_config,
            qkv=rows.data_ptr(),
            pitch=rows.stride(0),
            part=given.step,
            parts=0 if rows.dtype is torch.bfloat16 else given.parts,
            out=out.data_ptr(),
        )


def hopper_attention(
    kv: PagedKv, spec: GqaSpec, table: torch.Tensor, norm: HeadNorm | None
) -> HopperAttention | None:
    """The kernel for a layer, if there is one."""
    return HopperAttention(kv, spec, table, norm) if hopper_attention_fits(kv, spec) else None


def hopper_attention_fits(kv: PagedKv, spec: GqaSpec) -> bool:
    """Whether there is a kernel for this cache on its device."""
    k = kv.layer.k
    fits = k.dtype is torch.bfloat16 and not shape_obstacle(spec, kv.block_size)
    return fits and runs_hopper_kernels(k.device)


def shape_obstacle(spec: GqaSpec, block_size: int) -> str:
    """Why the kernel does not support these heads and blocks; "" if it does."""
    group = spec.heads // spec.kv_heads
    limits = (
        (spec.head_dim != _DIM, f"{spec.head_dim} channels of a head are not {_DIM}"),
        (group * spec.kv_heads != spec.heads, f"{spec.heads} query heads over {spec.kv_heads} KV heads"),
        (group > _MOST_GROUP, f"{group} query heads share a KV head, more than {_MOST_GROUP}"),
        (spec.window > 0, "the model's attention has a window"),
        (spec.clip > 0, "the model clips its projections"),
        (
            block_size < _LEAST_BLOCK or block_size & (block_size - 1) != 0,
            f"scheduler.block_size = {block_size} is no power of two from {_LEAST_BLOCK}",
        ),
    )
    return next((text for applies, text in limits if applies), "")


def launch_config_for(sequences: int, kv_heads: int, num_sms: int, *, mixed: bool = False) -> LaunchConfig:
    """One team for each (sequence, KV head), all at once, if the warps of all multiprocessors are enough.

    Args:
        mixed: chunks of prompts may be among the sequences. Then only the device knows how many run one
          token, so each gets all warps of a block.
    """
    each = -(-sequences * kv_heads // max(num_sms, 1))  # per multiprocessor; num_sms is 0 if interpreted
    team = _WARPS if mixed else max(_WARPS >> (max(each, 1) - 1).bit_length(), 1)
    return LaunchConfig(team, num_sms)
