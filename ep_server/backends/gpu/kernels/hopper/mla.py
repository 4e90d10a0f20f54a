"""[6] The Hopper kernel for latent attention with one token per sequence (csrc/kernels/hopper/mla).

It takes the arguments of Triton's kernel: queries in the latent space, and a cache that already holds the
token's own latent. It reads each context once for up to 64 heads. Other rows, caches and devices use decode()
of kernels/triton/paged_decode.py, which also defines the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ep_server.backends.gpu.capability import native, runs_hopper_kernels
from ep_server.backends.gpu.kernels.triton.launch import expect, expect_range
from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.backends.gpu.kernels.triton.paged_decode import MAX_SPLITS, Workspace, join
from ep_server.backends.gpu.step_input import StepTensors
from ep_server.errors import InternalError
from ep_server.models.families.spec import MlaSpec

_LATENT, _ROTARY = 512, 64
_DIM = _LATENT + _ROTARY
_HEADS, _MOST_HEADS, _LEAST_BLOCK, _PIECE = 16, 128, 16, 16
_TILE = 64  # positions
_TOGETHER = 64  # heads per block, at most
_ALONE = 32  # the most heads with which warpgroups can share a context
_WARPGROUPS = 2  # per block
_MOST_TEAM = 4  # warpgroups; the kernel supports 16, but larger clusters seemed not to fit at once
_LEAST_SPLIT = 256  # positions
_LEAST_PARTS = 4  # of a context that teams share; fewer gain less than joining them costs


@dataclass(frozen=True, slots=True)
class MlaLaunchConfig:
    """The configuration of a launch.

    team: warpgroups that share a (sequence, split), a power of two up to 16; more than two span several
      blocks. 1 with over 32 heads: a block's warpgroups then have different heads.
    blocks: upper bound, one per multiprocessor.
    splits: parts that each context is cut into; 1 with up to 32 heads and a team of 1.
    """

    team: int
    blocks: int
    splits: int = 1


class HopperMlaStep:
    """The state that all layers of a step share for its single tokens, which are its first rows."""

    def __init__(self, step: StepTensors, heads: int, config: MlaLaunchConfig) -> None:
        """config: mla_launch_config_for()'s. Raises: InternalError for another shape, dtype or layout."""
        count = self.count = len(step.singles)
        blocks, lengths = step.blocks[:count], step.singles.lengths
        expect_range("splits", config.splits, 1, MAX_SPLITS)
        expect("lengths", lengths, torch.int32, (count,))
        expect("blocks", blocks, torch.int32, (count, None), pitch=True)
        self.config, self.workspace = config, None
        if config.splits > 1:
            self.workspace = Workspace.of(count, heads, config.splits, _LATENT, lengths.device)
        module, room = native(), self.workspace
        self.work = module.MlaWork(
            count=count,
            lengths=lengths.data_ptr(),
            blocks=blocks.data_ptr(),
            blocks_pitch=blocks.stride(0),
            sums=0 if room is None else room.sums.data_ptr(),
            stats=0 if room is None else room.stats.data_ptr(),
        )
        self.native_config = module.MlaLaunchConfig(
            team=config.team,
            blocks=config.blocks,
            splits=config.splits,
        )
        self._held = step  # keeps its tensors alive


class HopperMla:
    """One layer, on any stream.

    Args:
        kv, spec: as hopper_mla_fits() says.
    Raises: InternalError for another shape, dtype or layout.
    """

    def __init__(self, kv: PagedKv, spec: MlaSpec) -> None:
        k, obstacle = kv.layer.k, mla_obstacle(spec, kv.block_size)
        if kv.layer.v is not None or obstacle:
            raise InternalError(f"latent attention for Hopper: {obstacle or 'the cache has a v'}")
        expect("cache k", k, torch.bfloat16, (len(k), kv.block_size, 1, _DIM))
        if k.data_ptr() % _PIECE:
            raise InternalError(f"cache k: at {k.data_ptr()}, must be 16-byte aligned")
        self._heads, self._held = spec.heads, k
        self._native: Any = native().Mla(
            device=k.device.index,
            cache=k.data_ptr(),
            positions=k.shape[0] * k.shape[1],
            heads=spec.heads,
            block_size=kv.block_size,
            scale=spec.scale,
        )

    def run(self, q: torch.Tensor, step: HopperMlaStep, out: torch.Tensor) -> None:
        """Attends; the tokens' latents are already in the cache. Runs on the current stream; can be captured.

        Args:
            q: [S, heads, 576] bfloat16, contiguous. out: [S, heads, 512] bfloat16, contiguous; zeros for
              sequences of length 0.
        Raises: InternalError for another shape, dtype or layout.
        """
        expect("q", q, torch.bfloat16, (step.count, self._heads, _DIM))
        expect("out", out, torch.bfloat16, (step.count, self._heads, _LATENT))
        if q.data_ptr() % _PIECE or out.data_ptr() % _PIECE:
            raise InternalError(f"q, out: at {q.data_ptr()}, {out.data_ptr()}, must be 16-byte aligned")
        self._native.run(
            stream=torch.cuda.current_stream(out.device).cuda_stream,
            step=step.work,
            config=step.native_config,
            q=q.data_ptr(),
            out=out.data_ptr(),
        )
        if step.workspace is not None:
            join(step.workspace, out)


def hopper_mla(kv: PagedKv, spec: MlaSpec) -> HopperMla | None:
    """The kernel for a layer, if there is one."""
    return HopperMla(kv, spec) if hopper_mla_fits(kv, spec) else None


def hopper_mla_fits(kv: PagedKv, spec: MlaSpec) -> bool:
    """Whether there is a kernel for this cache on its device."""
    k = kv.layer.k
    fits = k.dtype is torch.bfloat16 and not mla_obstacle(spec, kv.block_size)
    return fits and runs_hopper_kernels(k.device)


def mla_obstacle(spec: MlaSpec, block_size: int) -> str:
    """Why the kernel does not support these heads and blocks; "" if it does."""
    limits = (
        (
            (spec.kv_lora, spec.rope_dim) != (_LATENT, _ROTARY),
            f"{spec.kv_lora} + {spec.rope_dim} latent channels are not {_LATENT} + {_ROTARY}",
        ),
        (
            spec.heads % _HEADS != 0 or spec.heads > _MOST_HEADS,
            f"{spec.heads} heads are no multiple of {_HEADS} up to {_MOST_HEADS}",
        ),
        (
            block_size < _LEAST_BLOCK or block_size & (block_size - 1) != 0,
            f"scheduler.block_size = {block_size} is no power of two from {_LEAST_BLOCK}",
        ),
    )
    return next((text for applies, text in limits if applies), "")


def mla_launch_config_for(sequences: int, heads: int, num_sms: int, longest: int) -> MlaLaunchConfig:
    """As many warpgroups per sequence, up to four, as run at once for all sequences.

    Up to 32 heads, contexts are cut if teams would leave three quarters of the multiprocessors idle. With
    more heads, if the number of (sequence, 64 heads) is below half of the multiprocessors. The number of
    parts is a power of two, because Triton compiles the joining kernel for each number. The buckets of
    sequences, which run before there is traffic, cover all of them. longest: context, tokens.
    """
    parts = longest // _LEAST_SPLIT
    if heads > _ALONE:
        items = max(sequences * -(-heads // _TOGETHER), 1)
        return MlaLaunchConfig(1, num_sms, _cut(num_sms // items, parts, MAX_SPLITS))
    items = max(sequences, 1)
    team = _cut(_WARPGROUPS * num_sms // items, -(-longest // _TILE), _MOST_TEAM)
    if team < _MOST_TEAM:
        return MlaLaunchConfig(team, num_sms)
    splits = _cut(num_sms * _WARPGROUPS // (items * team), parts, MAX_SPLITS)
    return MlaLaunchConfig(team, num_sms, splits if splits >= _LEAST_PARTS else 1)


def _cut(*most: int) -> int:
    """The largest power of two that is at most every one of them, at least 1."""
    return 1 << max(min(most), 1).bit_length() - 1
