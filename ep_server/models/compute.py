"""The arithmetic with several implementations: matrix products, gated FFNs, paged attention.

`TorchCompute` is plain torch on any device, and the reference in tests. `NativeCompute` runs our CPU kernels.
Weights are prepared once, at load, in the layout that the implementation needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ep_server.models.batch import AttentionMeta
from ep_server.models.kv_cache import KvLayer


class Linear(Protocol):
    """A prepared weight matrix [n, k], perhaps with a bias [n]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, k] to [T, n] of x's dtype, which is the weight's. Rows may have a pitch."""
        ...

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """As a call, but the float32 sums as they are where the implementation has them: logits."""
        ...


class HeadLinear(Protocol):
    """Prepared weight matrices [heads, k, n], one for each head."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, heads, k] to [T, heads, n] of x's dtype, which is the weight's. x may have pitches."""
        ...


class GatedFfn(Protocol):
    """Prepared weights of E gated FFNs: down(silu(gate(x)) * up(x)) each."""

    def __call__(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Runs each FFN on its rows.

        Args:
            rows: [N, H], contiguous; those of FFN e at offsets[e] .. offsets[e + 1]. offsets: [E + 1] int64.
        Returns: [N, H] in the same order.
        """
        ...

    def room(self, index: int) -> FfnTensors:
        """Memory for new values of FFN `index`, which no rows are for until put(). In any thread.

        Returns: shapes and dtypes as `Compute.gated_ffn` takes them, of one FFN: [1, ..].
        """
        ...

    def put(self, index: int, values: FfnTensors) -> None:
        """FFN `index` has the values that were written into its room(); addresses stay. In any thread."""
        ...


class FfnScales(NamedTuple):
    """float32, one for each 128 x 128 block of FP8 codes; gate and up each begin with a block of their own.

    gate_up: [E, 2 * ceil(I / 128), ceil(H / 128)], gate blocks first.
    down: [E, ceil(H / 128), ceil(I / 128)].
    """

    gate_up: torch.Tensor
    down: torch.Tensor


FfnTensors = tuple[torch.Tensor, torch.Tensor, FfnScales | None]  # what `Compute.gated_ffn` takes


class Attend(Protocol):
    """Attention of one micro-batch, the same for all layers."""

    def __call__(self, q: torch.Tensor, kv: KvLayer, scale: float) -> torch.Tensor:
        """Softmax attention of each row over the cached positions up to its own.

        Args:
            q: [T, heads, k_dim]. The keys and values of these T tokens are already in `kv`.
        Returns: [T, heads, v_dim] of q's dtype.
        """
        ...


class Compute(Protocol):
    """One rank's arithmetic; one thread at a time may use it and what it prepared.

    device: where weights, caches and activations are. While weights load, several threads call `linear` and
    `gated_ffn` at once. fp8: `gated_ffn` takes FP8 codes, and the cache may be FP8.
    """

    fp8: bool

    @property
    def device(self) -> torch.device:
        """See above."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Prepares a matrix. weight: [n, k], float32 or bfloat16, contiguous. bias: [n] of the same dtype."""
        ...

    def head_linear(self, weight: torch.Tensor) -> HeadLinear:
        """Prepares a matrix for each head. weight: [heads, k, n], float32 or bfloat16, contiguous."""
        ...

    def gated_ffn(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        scales: FfnScales | None = None,
        *,
        held: Sequence[int] | None = None,
    ) -> GatedFfn:
        """Prepares E FFNs.

        Args:
            gate_up: [E, 2 * I, H], gate rows first. down: [E, H, I].
            scales: given where both are float8_e4m3fn, which only an `fp8` implementation takes.
            held: which of the E have values; put() gives the others theirs. None = all.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, rounded once or twice.

        Args:
            x: [T, dim], or [T, heads, dim] with a weight per head; rows may have a pitch.
            weight: [dim] or [heads, dim], of x's dtype.
        Returns: contiguous, of x's shape and dtype.
        """
        ...

    def attend(self, meta: AttentionMeta, window: int, dtype: torch.dtype) -> Attend:
        """Prepares attention. window: positions visible backwards, 0 = all. dtype: of queries and cache."""
        ...
