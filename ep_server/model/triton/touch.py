"""Asks the L2 cache for memory that a later kernel will read. Changes nothing but how long that takes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ep_server.errors import InternalError

LINE = 128  # bytes
_PROGRAMS, _LINES = 128, 128


@triton.jit
def _touch_kernel(base, pitch, lines, regions, LINE: tl.constexpr, LINES: tl.constexpr):
    for region in range(tl.program_id(0), regions, tl.num_programs(0)):
        start = base.to(tl.int64) + tl.cast(region, tl.int64) * pitch
        for first in range(0, lines, LINES):
            line = first + tl.arange(0, LINES)
            # Past the end of a region the last line is asked for again.
            at = start + tl.minimum(line, lines - 1).to(tl.int64) * LINE
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
            )


def touch(weight: torch.Tensor, regions: int, size: int) -> None:
    """Asks for the first `size` bytes of each of `regions` equal parts of a contiguous tensor on a GPU.

    Raises: InternalError where the parts are not equal or not so large.
    """
    pitch = weight.nbytes // regions
    if not weight.is_contiguous() or weight.nbytes % regions or not LINE <= size <= pitch:
        given = f"{size} of {weight.nbytes} bytes in {regions} parts"
        raise InternalError(f"touch: {given}, must be {LINE} to {pitch} of a contiguous tensor")
    grid = (min(_PROGRAMS, regions),)
    _touch_kernel[grid](weight, pitch, size // LINE, regions, LINE=LINE, LINES=_LINES, num_warps=4)
