"""The paged KV cache as kernels take it, and the one rule by which a value becomes an FP8 code.

    code  = rne_e4m3(clamp(x / scale, +-448))     a NaN stays a NaN
    value = float32(code) * scale

Knows nothing of attention or of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ep_server.backends.gpu.kernels.triton.checks import FLOATS, FP8, expect
from ep_server.errors import InternalError
from ep_server.models.kv_cache import KvLayer


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One layer's cache, of the queries' dtype or float8_e4m3fn.

    layer: k: [blocks, block_size, kv_heads, k_dim]; v likewise, or None: values are the first v_dim channels
      of k. A position's heads and channels are contiguous.
    k_scale, v_scale: [kv_heads] float32, with an FP8 cache only; v_scale only where the layer has a v.
    """

    layer: KvLayer
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def fp8(self) -> bool:
        """Codes with a scale."""
        return self.layer.k.dtype is FP8

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self.layer.k.shape[1]

    @property
    def kv_heads(self) -> int:
        """Heads of keys; 1 for latent attention."""
        return self.layer.k.shape[2]

    def check(self) -> None:
        """Raises InternalError for a cache that the kernels cannot address."""
        k, v = self.layer.k, self.layer.v
        expect("cache k", k, (*FLOATS, FP8), (None, None, None, None))
        if v is not None:
            expect("cache v", v, k.dtype, (*k.shape[:3], self.layer.v_dim))
        for name, scale, needed in (
            ("k_scale", self.k_scale, self.fp8),
            ("v_scale", self.v_scale, self.fp8 and v is not None),
        ):
            if (scale is not None) != needed:
                raise InternalError(f"{name}: must be {'given' if needed else 'None'} with a {k.dtype} cache")
            if scale is not None:
                expect(name, scale, torch.float32, (self.kv_heads,))


@triton.jit
def to_code(x, scale):
    """x: float32 to what an FP8 cache stores."""
    return tl.clamp(x / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
