"""Tensors without memory, for launches that are only compiled."""

from __future__ import annotations

import torch

from ep_server.backends.gpu.kernels.triton.paged import PagedKv, Sequences
from ep_server.models.kv_cache import KvLayer

BF16, F32, FP8, I64, I32 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.int32
TOKENS = 128  # rows of a step


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gqa_cache(dtype: torch.dtype) -> PagedKv:
    k = meta(4096, 16, 4, 128, dtype=dtype)
    scale = meta(4, dtype=F32) if dtype is FP8 else None
    return PagedKv(KvLayer(k, k, 128), scale, scale)


def mla_cache(dtype: torch.dtype) -> PagedKv:
    return PagedKv(
        KvLayer(meta(4096, 16, 1, 576, dtype=dtype), None, 512), meta(1, dtype=F32) if dtype is FP8 else None
    )


def sequences(count: int) -> Sequences:
    return Sequences(meta(count, 512, dtype=I32), meta(count, dtype=I32))
