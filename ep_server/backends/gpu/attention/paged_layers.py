"""The cache of every layer as the kernels take it: an FP8 one with its scales."""

from __future__ import annotations

from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.models.decoder import DecoderParams
from ep_server.models.layers import KvScales


def paged_layers(params: DecoderParams) -> list[PagedKv]:
    """One per layer; scales are the checkpoint's, or 1. Raises: InternalError for a cache of other dtypes."""
    layers = []
    for cached, weights in zip(params.kv_cache.layers, params.weights.layers, strict=True):
        kv = PagedKv(cached)
        if kv.fp8:
            scales = weights.kv_scales or KvScales.ones(params.spec.attention, params.compute.device)
            kv = PagedKv(cached, scales.k, scales.v)
        kv.check()
        layers.append(kv)
    return layers
