"""Helpers of all launchers: argument checks, programmatic dependent launch, ragged tiles, compile counts.

Programmatic dependent launch: the device sets up a kernel's blocks while the last blocks of the kernel before
it still run. Such a kernel calls after_previous() before it reads what other kernels of the step write. The
call waits until all earlier work has ended and its writes are visible, so the order of work is that of the
stream; it saves a part of the microsecond between two kernels. Before the call a kernel may read weights and
the step's inputs (slots, positions). Kernels ahead may still run, so they must not write these: a test that
makes inputs on the device synchronises first, and in a step embed() follows what writes them and starts no
kernel early.

Short kernels, and kernels whose successor reads weights, start their successor at once. Behind long kernels
that cost more than it saved, because waiting blocks take room from working ones. The exception is the
experts' kernel (csrc/kernels/hopper/experts), whose blocks leave one by one. Needs compute capability 9.0.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ep_server.errors import InternalError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)
FP8 = torch.float8_e4m3fn
E4M3_MAX = 448.0


def expect(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    *,
    pitch: bool = False,
) -> None:
    """Checks one argument of a launcher.

    Args:
        dtype: one, or the ones that are allowed. shape: None for a length that may be any.
        pitch: the first dimension may have any stride. The other dimensions must be contiguous.
    Raises: InternalError naming what was given and what is allowed.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype in dtypes and fits and (tensor.numel() == 0 or _laid(tensor, pitch)):
        return
    sizes = ", ".join("any" if n is None else str(n) for n in shape)
    kinds = " or ".join(str(kind) for kind in dtypes)
    layout = "rows of contiguous" if pitch else "contiguous"
    given = f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}"
    raise InternalError(f"{name}: {given}, expected {layout} {kinds} [{sizes}]")


def _laid(tensor: torch.Tensor, pitch: bool) -> bool:
    return tensor[0].is_contiguous() if pitch else tensor.is_contiguous()


def expect_range(name: str, value: int, low: int, high: int) -> None:
    """Raises InternalError unless low <= value <= high."""
    if not low <= value <= high:
        raise InternalError(f"{name} = {value}: must be {low} to {high}")


def block(size: int, least: int = 1) -> int:
    """The power of two that covers `size` and `least`. Tiles are padded to it."""
    return max(1 << max(size - 1, 0).bit_length(), least)


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """Called by every block, also an idle one: the next kernel relies on it. EARLY: see early()."""
    if EARLY >= 2:
        gdc_launch_dependents()
    if EARLY >= 1:
        gdc_wait()


def early(tensor: torch.Tensor, *, lets_next_start: bool = False) -> dict[str, int | bool]:
    """Arguments of a launch on the device of `tensor`; the meta device stands for an H200.

    lets_next_start: the next kernel may start at once, not when this one ends.
    """
    kind = tensor.device.type
    if kind == "meta" or (kind == "cuda" and _hopper(tensor.device.index)):
        return {"EARLY": 2 if lets_next_start else 1, "launch_pdl": True}
    return {"EARLY": 0}


@cache
def _hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


@triton.jit
def tile_counts(rows, STEP: tl.constexpr):
    """rows: [parts] rows of each part, 0 past the last one. Returns the tiles of STEP rows of each."""
    return ((rows + STEP - 1) // STEP).to(tl.int32)


@triton.jit
def find_tile(tiles, tile):
    """The part that the tile-th tile belongs to, and the tile's number inside it. tiles: of tile_counts.

    The tile must exist: a caller with too many programs compares with the sum of `tiles` first.
    """
    before = tl.cumsum(tiles, axis=0) <= tile
    return tl.sum(before.to(tl.int32), axis=0), tile - tl.sum(tl.where(before, tiles, 0), axis=0)


log = logging.getLogger(__name__)


class Compilations:
    """Counts compilations through Triton's hook. There is one hook per process; the last object made has it.

    count: kernels so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._expected = True
        knobs.runtime.jit_post_compile_hook = self._compiled

    def expect_none(self) -> None:
        """From now on, logs a warning for each compilation."""
        self._expected = False

    def _compiled(self, *, repr: str, **_: Any) -> None:
        self.count += 1
        if not self._expected:
            log.warning("a step waited for a kernel that was not compiled at start: %s", repr)
