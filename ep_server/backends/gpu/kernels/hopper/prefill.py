"""[6] The Hopper kernel for attention of prompt chunks (csrc/kernels/hopper/prefill).

It reads what kernels/triton/paged_prefill.py reads, which defines the result and serves other caches and
devices. Softmax weights are rounded to bfloat16 before they meet the values, as there. Of latents it reads
the expanded keys and values, see kernels/triton/expand.py.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_server.backends.gpu.capability import native, runs_hopper_kernels
from ep_server.backends.gpu.kernels.triton.expand import TILE, ExpandedKv
from ep_server.backends.gpu.kernels.triton.launch import expect, expect_range
from ep_server.backends.gpu.kernels.triton.paged import PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_prefill import MAX_SEQUENCES
from ep_server.errors import InternalError
from ep_server.models.families.spec import GqaSpec, MlaSpec

_DIM, _ROPE, _LATENT, _MOST_GROUP, _LEAST_BLOCK, _PIECE = 128, 64, 512, 128, 8, 16
Scales = tuple[torch.Tensor, torch.Tensor]  # of a cache's keys and of its values, [heads] float32 each


class HopperPrefill:
    """One layer, on any stream. Launches on a device must not run beside each other.

    Args:
        kv, spec: as prefill_obstacle() says.
        scratch: of prefill_scratch(), which all layers may share.
    Raises: InternalError for another shape, dtype or layout.
    """

    def __init__(self, kv: PagedKv, spec: GqaSpec, scratch: torch.Tensor) -> None:
        k, v, obstacle = kv.layer.k, kv.layer.v, prefill_obstacle(spec, kv.block_size)
        if v is None or obstacle:
            raise InternalError(f"prefill for Hopper: {obstacle or 'the cache has no v'}")
        for name, each in (("cache k", k), ("cache v", v)):
            expect(name, each, torch.bfloat16, (len(k), kv.block_size, spec.kv_heads, _DIM))
            if each.device != k.device or each.data_ptr() % _PIECE:
                raise InternalError(f"{name}: on {each.device}, must be 16-byte aligned on {k.device}")
        expect("scratch", scratch, torch.uint8, (native().Prefill.scratch_bytes(device=k.device.index),))
        self._spec, self._held = spec, (k, v, scratch)
        self._native: Any = native().Prefill(
            device=k.device.index,
            k=k.data_ptr(),
            v=v.data_ptr(),
            rotary=0,
            positions=k.shape[0] * k.shape[1],
            kv_heads=spec.kv_heads,
            group=spec.heads // spec.kv_heads,
            block_size=kv.block_size,
            scale=spec.scale,
            scratch=scratch.data_ptr(),
        )

    def run(
        self,
        q: torch.Tensor,
        query_start: torch.Tensor,
        sequences: Sequences,
        out: torch.Tensor,
        scales: Scales | None = None,
    ) -> None:
        """Attends with the tokens of S chunks. Runs on the current stream; can be captured.

        Args:
            q, out: [T, heads, 128] bfloat16, contiguous. Rows without a chunk are neither read nor written.
            query_start, sequences: as for prefill() of kernels/triton, all int32.
            scales: of kv_heads; None = 1.
        Raises: InternalError for another shape, dtype or layout.
        """
        for name, each in (("q", q), ("out", out)):
            expect(name, each, torch.bfloat16, (len(q), self._spec.heads, _DIM))
        _run(self._native, q, query_start, sequences, out, scales, self._spec.kv_heads)


class HopperLatentPrefill:
    """Attention over the expanded latents of some heads. On any stream.

    Args:
        kv: bfloat16; blocks are tiles. scale, scratch: of the scores; as for HopperPrefill.
    Raises: InternalError for another shape, dtype or layout.
    """

    def __init__(self, kv: ExpandedKv, scale: float, scratch: torch.Tensor) -> None:
        self._heads, positions = len(kv.k), len(kv.rope)
        for name, each in (("expanded k", kv.k), ("expanded v", kv.v)):
            expect(name, each, torch.bfloat16, (self._heads, positions, _DIM))
        expect("expanded rope", kv.rope, torch.bfloat16, (positions, _ROPE))
        for name, each in (("expanded k", kv.k), ("expanded v", kv.v), ("expanded rope", kv.rope)):
            if each.device != kv.k.device or each.data_ptr() % _PIECE:
                raise InternalError(f"{name}: on {each.device}, must be 16-byte aligned on {kv.k.device}")
        size = native().Prefill.scratch_bytes(device=kv.k.device.index)
        expect("scratch", scratch, torch.uint8, (size,))
        self._held = kv, scratch
        self._native: Any = native().Prefill(
            device=kv.k.device.index,
            k=kv.k.data_ptr(),
            v=kv.v.data_ptr(),
            rotary=kv.rope.data_ptr(),
            positions=positions,
            kv_heads=self._heads,
            group=1,
            block_size=TILE,
            scale=scale,
            scratch=scratch.data_ptr(),
        )

    def run(
        self,
        q: torch.Tensor,
        query_start: torch.Tensor,
        sequences: Sequences,
        out: torch.Tensor,
        scales: Scales | None = None,
    ) -> None:
        """As HopperPrefill.run(), with tables of tiles.

        Args:
            q: [T, heads, 192], out: [T, heads, 128]: these heads of larger rows, or whole rows.
        """
        expect("q", q, torch.bfloat16, (len(q), self._heads, _DIM + _ROPE), pitch=True)
        expect("out", out, torch.bfloat16, (len(q), self._heads, _DIM), pitch=True)
        _run(self._native, q, query_start, sequences, out, scales, self._heads)


def _run(
    kernel: Any,
    q: torch.Tensor,
    query_start: torch.Tensor,
    sequences: Sequences,
    out: torch.Tensor,
    scales: Scales | None,
    kv_heads: int,
) -> None:
    """Launches it; q and out have been checked, but for where they are."""
    count, blocks = len(sequences.lengths), sequences.blocks
    q_pitch, out_pitch = q.stride(0) * q.element_size(), out.stride(0)
    for name, each, pitch, unit in (("q", q, q_pitch, _PIECE), ("out", out, out_pitch, out.shape[2])):
        if each.data_ptr() % _PIECE or pitch % unit:
            raise InternalError(
                f"{name}: at {each.data_ptr()}, must be {_PIECE}-byte aligned, in whole heads"
            )
    expect_range("sequences", count, 0, MAX_SEQUENCES)
    expect("query_start", query_start, torch.int32, (count + 1,))
    expect("lengths", sequences.lengths, torch.int32, (count,))
    expect("blocks", blocks, torch.int32, (count, None), pitch=True)
    for name, each in zip(("k_scale", "v_scale"), scales or (), strict=False):
        expect(name, each, torch.float32, (kv_heads,))
    k_scale, v_scale = (0, 0) if scales is None else (each.data_ptr() for each in scales)
    kernel.run(
        stream=torch.cuda.current_stream(q.device).cuda_stream,
        q=q.data_ptr(),
        q_pitch=q_pitch,
        out=out.data_ptr(),
        row_heads=out_pitch // out.shape[2],
        query_start=query_start.data_ptr(),
        lengths=sequences.lengths.data_ptr(),
        blocks=blocks.data_ptr(),
        blocks_pitch=blocks.stride(0) if count > 1 else blocks.shape[1],  # a single row has any stride
        tokens=len(q),
        sequences=count,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def prefill_scratch(device: torch.device) -> torch.Tensor:
    """What the kernels of a device share; empty if it has none."""
    size = 0
    if runs_hopper_kernels(device):
        number = torch.cuda.current_device() if device.index is None else device.index
        size = native().Prefill.scratch_bytes(device=number)
    return torch.zeros(size, dtype=torch.uint8, device=device)  # its counters begin at 0


def hopper_prefill(kv: PagedKv, spec: GqaSpec, scratch: torch.Tensor) -> HopperPrefill | None:
    """The kernel for a layer, if there is one."""
    k = kv.layer.k
    fits = k.dtype is torch.bfloat16 and not prefill_obstacle(spec, kv.block_size)
    return HopperPrefill(kv, spec, scratch) if fits and runs_hopper_kernels(k.device) else None


def prefill_obstacle(spec: GqaSpec, block_size: int) -> str:
    """Why the kernel does not support these heads and blocks; "" if it does."""
    group = spec.heads // spec.kv_heads
    limits = (
        (spec.head_dim != _DIM, f"{spec.head_dim} channels of a head are not {_DIM}"),
        (group * spec.kv_heads != spec.heads, f"{spec.heads} query heads over {spec.kv_heads} KV heads"),
        (group > _MOST_GROUP, f"{group} query heads share a KV head, more than {_MOST_GROUP}"),
        (spec.window > 0, "the model's attention has a window"),
        (
            block_size < _LEAST_BLOCK or block_size & (block_size - 1) != 0,
            f"scheduler.block_size = {block_size} is no power of two from {_LEAST_BLOCK}",
        ),
    )
    return next((text for applies, text in limits if applies), "")


def latent_prefill_obstacle(spec: MlaSpec, block_size: int) -> str:
    """Why chunks cannot attend to expanded latents of this shape; "" if they can."""
    limits = (
        (spec.kv_lora != _LATENT, f"{spec.kv_lora} latent channels are not {_LATENT}"),
        (
            (spec.nope_dim, spec.rope_dim, spec.v_dim) != (_DIM, _ROPE, _DIM),
            f"{spec.nope_dim} + {spec.rope_dim} channels of keys and {spec.v_dim} of values are not "
            f"{_DIM} + {_ROPE} and {_DIM}",
        ),
        (
            block_size > TILE or block_size & (block_size - 1) != 0,
            f"scheduler.block_size = {block_size} is no power of two up to {TILE}",
        ),
    )
    return next((text for applies, text in limits if applies), "")
