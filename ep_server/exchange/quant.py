"""Defines the FP8 arithmetic of the exchange, in torch; csrc/exchange/common/quant.hpp matches it bit for
bit.

A group is 128 neighbouring channels of one row:

    amax   = max(1e-4, max |x|)                     float32; a NaN stays a NaN
    scale  = amax / 448                             float32 division (FP8)
           = the smallest power of two >= amax/448  (FP8_POW2, FP8_UE8M0)
    code   = rne_e4m3(clamp(x * inverse, +-448))    float32; inverse = 448 / amax (FP8), 1 / scale (else)
    value  = float32(code) * scale

A group with a NaN or an infinity reads back as NaN: it never becomes a wrong finite number.
UE8M0 stores the biased exponent byte of a scale; four groups, lowest first, share an int32.
"""

from __future__ import annotations

import torch

from ep_server.errors import InvalidArgument
from ep_server.exchange.spec import FP8, Payload, hidden_multiple

GROUP = 128  # channels that share a scale
PACK = 4  # UE8M0 exponents in one int32
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4


def scale_columns(hidden: int, payload: Payload) -> int:
    """How many scale words a row of `hidden` channels carries; 0 where the payload has none."""
    return hidden // hidden_multiple(payload) if payload in FP8 else 0


def scale_dtype(payload: Payload) -> torch.dtype:
    """int32 for packed exponents, float32 otherwise."""
    return torch.int32 if payload is Payload.FP8_UE8M0 else torch.float32


def quantise(x: torch.Tensor, payload: Payload) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts rows to e4m3 with one scale per group.

    Args:
        x: [N, H] bfloat16 or float32.
        payload: FP8, FP8_POW2 or FP8_UE8M0.
    Returns: codes [N, H] float8_e4m3fn; scales [N, H/128] float32, or [N, H/512] int32 for FP8_UE8M0.
    Raises: InvalidArgument if H does not divide.
    """
    num_rows, hidden = x.shape
    if hidden % hidden_multiple(payload):
        allowed = f"a multiple of {hidden_multiple(payload)} for payload {payload.value}"
        raise InvalidArgument("hidden", hidden, allowed)
    groups = x.float().view(num_rows, hidden // GROUP, GROUP)
    amax = groups.abs().amax(dim=-1).clamp(min=AMAX_FLOOR)  # NaN passes through both
    # Divide by a tensor, not a Python scalar: some backends turn the latter into a multiplication.
    limit = torch.full_like(amax, E4M3_MAX)
    scale, inverse = amax / limit, limit / amax
    if payload is not Payload.FP8:
        scale = round_up_pow2(scale)
        inverse = scale.reciprocal()  # exact for a power of two
    scaled = (groups * inverse.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.to(torch.float8_e4m3fn).view(num_rows, hidden)
    return codes, pack_ue8m0(scale) if payload is Payload.FP8_UE8M0 else scale


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of quantise: codes [..., H] and their scales give float32 [..., H]."""
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales)
    groups = codes.float().view(*codes.shape[:-1], scales.shape[-1], GROUP)
    return (groups * scales.unsqueeze(-1)).view(codes.shape)


def round_up_pow2(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= each positive normal float32, by its bits; infinity and NaN stay."""
    exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23  # a non-zero mantissa carries into the exponent
    return torch.where(scale.isfinite(), (exponent << 23).view(torch.float32), scale)


def pack_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two [..., G] float32 to exponent bytes, four per int32 [..., G/4], lowest byte first."""
    shape = (*scale.shape[:-1], scale.shape[-1] // PACK, PACK)
    exponents = ((scale.view(torch.int32) >> 23) & 0xFF).view(shape)
    return (exponents << torch.arange(0, 32, 8, dtype=torch.int32, device=scale.device)).sum(
        -1, dtype=torch.int32
    )


def unpack_ue8m0(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of pack_ue8m0: [..., G/4] int32 to [..., G] float32."""
    exponents = (
        packed.unsqueeze(-1) >> torch.arange(0, 32, 8, dtype=torch.int32, device=packed.device)
    ) & 0xFF
    return (exponents.flatten(-2) << 23).view(torch.float32)
