"""[6] The Hopper kernel for attention of prompt chunks (csrc/kernels/hopper/prefill).

It reads what kernels/triton/paged_prefill.py reads, which defines the result and serves other caches and
devices. Softmax weights are rounded to bfloat16 before they meet the values, as there.
"""

from __future__ import annotations

from typing import Any

import torch

from ep_server.backends.gpu.capability import native, runs_hopper_kernels
from ep_server.backends.gpu.kernels.triton.launch import expect, expect_range
from ep_server.backends.gpu.kernels.triton.paged import PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_prefill import MAX_SEQUENCES
from ep_server.errors import InternalError
from ep_server.models.families.spec import GqaSpec

_DIM, _MOST_GROUP, _LEAST_BLOCK, _PIECE = 128, 128, 8, 16


class HopperPrefill:
    """One layer, on any stream.

    Args:
        kv, spec: as prefill_obstacle() says.
        scratch: of prefill_scratch(), which launches in one stream may share. With it, several blocks share
            the context of a chunk if there are few tiles of rows; None = one block reads all of it.
    Raises: InternalError for another shape, dtype or layout.
    """

    def __init__(self, kv: PagedKv, spec: GqaSpec, scratch: torch.Tensor | None = None) -> None:
        k, v, obstacle = kv.layer.k, kv.layer.v, prefill_obstacle(spec, kv.block_size)
        if v is None or obstacle:
            raise InternalError(f"prefill for Hopper: {obstacle or 'the cache has no v'}")
        for name, each in (("cache k", k), ("cache v", v)):
            expect(name, each, torch.bfloat16, (len(k), kv.block_size, spec.kv_heads, _DIM))
            if each.device != k.device or each.data_ptr() % _PIECE:
                raise InternalError(f"{name}: on {each.device}, must be 16-byte aligned on {k.device}")
        if scratch is not None:
            expect("scratch", scratch, torch.uint8, (native().Prefill.scratch_bytes(device=k.device.index),))
        self._spec, self._held = spec, (k, v, scratch)
        self._native: Any = native().Prefill(
            device=k.device.index,
            k=k.data_ptr(),
            v=v.data_ptr(),
            positions=k.shape[0] * k.shape[1],
            kv_heads=spec.kv_heads,
            group=spec.heads // spec.kv_heads,
            block_size=kv.block_size,
            scale=spec.scale,
            scratch=0 if scratch is None else scratch.data_ptr(),
        )

    def run(
        self,
        q: torch.Tensor,
        query_start: torch.Tensor,
        sequences: Sequences,
        out: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Attends with the tokens of S chunks. Runs on the current stream; can be captured.

        Args:
            q, out: [T, heads, 128] bfloat16, contiguous. Rows without a chunk are neither read nor written.
            query_start, sequences: as for prefill() of kernels/triton, all int32.
            scales: of the cache's keys and of its values, [kv_heads] float32 each; None = 1.
        Raises: InternalError for another shape, dtype or layout.
        """
        count, blocks = len(sequences.lengths), sequences.blocks
        for name, each in (("q", q), ("out", out)):
            expect(name, each, torch.bfloat16, (len(q), self._spec.heads, _DIM))
            if each.data_ptr() % _PIECE:
                raise InternalError(f"{name}: must be {_PIECE}-byte aligned")
        expect_range("sequences", count, 0, MAX_SEQUENCES)
        expect("query_start", query_start, torch.int32, (count + 1,))
        expect("lengths", sequences.lengths, torch.int32, (count,))
        expect("blocks", blocks, torch.int32, (count, None), pitch=True)
        for name, each in zip(("k_scale", "v_scale"), scales or (), strict=False):
            expect(name, each, torch.float32, (self._spec.kv_heads,))
        k_scale, v_scale = (0, 0) if scales is None else (each.data_ptr() for each in scales)
        self._native.run(
            stream=torch.cuda.current_stream(q.device).cuda_stream,
            q=q.data_ptr(),
            out=out.data_ptr(),
            query_start=query_start.data_ptr(),
            lengths=sequences.lengths.data_ptr(),
            blocks=blocks.data_ptr(),
            blocks_pitch=blocks.stride(0) if count > 1 else blocks.shape[1],  # a single row has any stride
            tokens=len(q),
            sequences=count,
            k_scale=k_scale,
            v_scale=v_scale,
        )


def prefill_scratch(device: torch.device) -> torch.Tensor | None:
    """What the kernels of a device share; None if it has none."""
    if not runs_hopper_kernels(device):
        return None
    number = torch.cuda.current_device() if device.index is None else device.index
    size: int = native().Prefill.scratch_bytes(device=number)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def hopper_prefill(kv: PagedKv, spec: GqaSpec, scratch: torch.Tensor | None) -> HopperPrefill | None:
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
