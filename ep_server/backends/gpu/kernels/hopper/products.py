"""The Hopper kernel for products of few rows with one weight. It returns partial sums.

The kernel that reads the product adds the sums. A block loads its weights before the previous kernel has
ended; a library's kernels would wait, and delay all that follow. Other rows and weights use the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep_server.backends.gpu.capability import native, runs_hopper_kernels, sm_count
from ep_server.backends.gpu.kernels.triton.launch import expect, expect_range
from ep_server.backends.gpu.kernels.triton.partial import MOST_PARTS, Partial
from ep_server.errors import InternalError

MOST_ROWS = 256  # with more, products are bound by arithmetic
_ROWS_OF_TILE, _TILES = (32, 64, 128), (128, 64)
_CHUNK, _PIECE = 64, 16  # input channels; bytes
_MOST_HELD = 192 << 10  # bytes of a block's weights: the rest of its shared memory is for rows


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows up to which a layer's products use our kernels, 0 = never."""

    qkv: int = 0
    out: int = 0
    router: int = 0


# Where steps were faster on H200s: with one rank, and with several. With several, memory is idle during the
# combine and can load the weights of the next product.
HOPPER_LIMITS = Limits(qkv=32, out=64, router=256)
HOPPER_LIMITS_AMONG_RANKS = Limits(qkv=64, out=64, router=256)


@dataclass(frozen=True, slots=True)
class SplitK:
    """How blocks share a weight [N, K]. tile: rows of it, 64 or 128. splits: runs of its columns."""

    tile: int
    splits: int


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The configuration of a launch.

    split_k: None = split_k_for(). rows_of_tile: 0 = rows_of_tile().
    lets_next_start: the next kernel is set up as soon as this one begins, not as it ends.
    """

    split_k: SplitK | None = None
    rows_of_tile: int = 0
    lets_next_start: bool = False


class HopperProduct:
    """x @ weight.T of rows x, on any stream.

    Args:
        weight: [N, K] bfloat16, on a Hopper GPU; kept alive. See `hopper_fits`.
        most_rows: that takes() accepts, up to MOST_ROWS.
    Raises: InternalError for another shape, dtype or layout.
    """

    def __init__(
        self, weight: torch.Tensor, most_rows: int = MOST_ROWS, config: LaunchConfig = LaunchConfig()
    ) -> None:
        expect("weight", weight, torch.bfloat16, (None, None))
        expect_range("most_rows", most_rows, 0, MOST_ROWS)
        n, k = weight.shape
        split_k = config.split_k or split_k_for(n, k, sm_count(weight.device))
        if split_k is None:
            raise InternalError(f"weight: no split fits {n} x {k}, see split_k_for()")
        expect_range("splits", split_k.splits, 1, MOST_PARTS)
        self._spare = max(sm_count(weight.device) // (n // split_k.tile * split_k.splits), 1)
        self._weight, self._most, self._split_k, self._config = weight, most_rows, split_k, config
        self._linear = native().Linear(
            device=weight.device.index,
            weight=weight.data_ptr(),
            n=n,
            k=k,
            tile=split_k.tile,
            splits=split_k.splits,
        )

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the kernel supports these rows."""
        aligned = x.data_ptr() % _PIECE == 0 and _pitch(x) % _PIECE == 0 and x.stride(1) == 1
        return 0 < len(x) <= self._most and x.dtype is torch.bfloat16 and aligned

    def __call__(self, x: torch.Tensor) -> Partial:
        """As run(), into newly allocated sums."""
        sums = x.new_empty(self._split_k.splits, len(x), len(self._weight), dtype=torch.float32)
        self.run(x, sums)
        return Partial(sums)

    def run(self, x: torch.Tensor, sums: torch.Tensor) -> None:
        """Runs on the current stream, without copies or allocations; can be captured.

        Args:
            x: [T, K], as `takes` says. sums: [splits, T, N] float32, contiguous; is filled.
        Raises: InternalError for another shape, dtype or layout.
        """
        n, k = self._weight.shape
        expect("x", x, torch.bfloat16, (None, k), pitch=True)
        expect("sums", sums, torch.float32, (self._split_k.splits, len(x), n))
        self._linear.run(
            stream=torch.cuda.current_stream(x.device).cuda_stream,
            rows=x.data_ptr(),
            pitch=_pitch(x),
            count=len(x),
            sums=sums.data_ptr(),
            rows_of_tile=self._config.rows_of_tile or rows_of_tile(len(x), self._spare),
            lets_next_start=self._config.lets_next_start,
        )


def product(
    x: torch.Tensor, hopper: HopperProduct | None, library: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | Partial:
    """Product of rows x: [T, K], by the Hopper kernel if it supports them."""
    return hopper(x) if hopper is not None and hopper.takes(x) else library(x)


def hopper_product(
    weight: torch.Tensor, most_rows: int, bias: torch.Tensor | None = None
) -> HopperProduct | None:
    """The kernel for a weight, if it supports that weight and any number of rows."""
    if most_rows == 0 or bias is not None or not hopper_fits(weight):
        return None
    return HopperProduct(weight, most_rows)


def hopper_fits(weight: torch.Tensor) -> bool:
    """Whether there is a kernel for this weight on its device."""
    if not runs_hopper_kernels(weight.device) or weight.dtype is not torch.bfloat16 or weight.dim() != 2:
        return False
    laid = weight.is_contiguous() and weight.data_ptr() % _PIECE == 0
    n, k = weight.shape
    return laid and split_k_for(n, k, sm_count(weight.device)) is not None


def split_k_for(n: int, k: int, blocks: int) -> SplitK | None:
    """The split that keeps the most of so many blocks busy at once; None if none fits a weight [n, k]."""
    chunks = k // _CHUNK if k % _CHUNK == 0 else 0
    fitting = [
        SplitK(tile, splits)
        for tile in _TILES
        if n % tile == 0
        for splits in range(1, min(chunks, blocks * tile // max(n, 1), MOST_PARTS // 2) + 1)
        if -(-chunks // splits) * _CHUNK * 2 * tile <= _MOST_HELD
    ]
    return max(fitting, key=lambda split_k: n // split_k.tile * split_k.splits, default=None)


def rows_of_tile(rows: int, blocks: int) -> int:
    """Rows that a block multiplies at a time if so many blocks may share them: the smallest that fits."""
    return next((tile for tile in _ROWS_OF_TILE if rows <= tile * blocks), _ROWS_OF_TILE[-1])


def _pitch(x: torch.Tensor) -> int:
    """Bytes between two rows; a single row may have any stride."""
    return (x.stride(0) if len(x) > 1 else x.shape[1]) * x.element_size()
