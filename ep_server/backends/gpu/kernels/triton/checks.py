"""What the launchers check before a kernel sees an address: dtype, shape, whole rows. Knows no kernel."""

from __future__ import annotations

import torch

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
        pitch: the first dimension may have any stride; what it counts is contiguous in any case.
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
    """The power of two that covers `size` and `least`: what a tile of that many elements is padded to."""
    return max(1 << max(size - 1, 0).bit_length(), least)
