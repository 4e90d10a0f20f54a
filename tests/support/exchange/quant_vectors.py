"""Test vectors of the FP8 arithmetic, as bits: any implementation of quant.hpp's rules is held to them.

A vector is one group of 128 channels: `inputs` are bfloat16 bits, the rest of the group is zero. `scale` is
float32 bits, or the exponent byte for fp8_ue8m0; `codes` are the e4m3 bytes of `inputs`, the rest is 0.
Worked out by hand from the rules in ep_server/exchange/quant.py, not printed from an implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ep_server.exchange.api import Payload


@dataclass(frozen=True)
class Vector:
    """See the module docstring."""

    name: str
    payload: Payload
    inputs: tuple[int, ...]
    scale: int
    codes: tuple[int, ...]


VECTORS = (
    # amax 448: scale 1, so codes can be read off. 448, 1, -1, 0, -0; 1.0625 and 1.1875 tie, both to even.
    Vector(
        "unit_scale",
        Payload.FP8,
        (0x43E0, 0x3F80, 0xBF80, 0x0000, 0x8000, 0x3F88, 0x3F98),
        0x3F800000,
        (0x7E, 0x38, 0xB8, 0x00, 0x80, 0x38, 0x3A),
    ),
    # Subnormal codes count 2^-9: 2^-9, 2^-10 (tie to 0), 3*2^-10 (tie to 2), 7*2^-9; 2^-6 is normal.
    Vector(
        "subnormal_codes",
        Payload.FP8,
        (0x43E0, 0x3B00, 0x3A80, 0x3B40, 0x3C60, 0x3C80),
        0x3F800000,
        (0x7E, 0x01, 0x00, 0x02, 0x07, 0x08),
    ),
    # amax below 1e-4 is raised to it: scale = float32(1e-4) / 448 = 0x346FACAD.
    # All zeros stay zeros.
    Vector("zero_group", Payload.FP8, (0x0000, 0x8000), 0x346FACAD, (0x00, 0x80)),
    # amax 1: scale = 1 / 448 = 0x3B124925; 1 -> 448, 0.5 -> 224, -0.25 -> -112.
    Vector("amax_one", Payload.FP8, (0x3F80, 0x3F00, 0xBE80), 0x3B124925, (0x7E, 0x76, 0xEE)),
    # Power of two: 1 / 448 rounds up to 2^-8 (0x3B800000), so 1 -> 256, 0.5 -> 128.
    Vector("pow2_rounds_up", Payload.FP8_POW2, (0x3F80, 0x3F00), 0x3B800000, (0x78, 0x70)),
    # amax 448 is a power of two already: the scale stays 1.
    Vector("pow2_exact", Payload.FP8_POW2, (0x43E0, 0x3F80), 0x3F800000, (0x7E, 0x38)),
    # One bfloat16 step above 448 is 450: scale 2, and 450 / 2 = 225 rounds to 224.
    Vector("pow2_just_above", Payload.FP8_POW2, (0x43E1, 0x3F80), 0x40000000, (0x76, 0x30)),
    # The floor: 1e-4 / 448 = 2.23e-7 rounds up to 2^-22 (0x34800000).
    Vector("pow2_floor", Payload.FP8_POW2, (0x0000,), 0x34800000, (0x00,)),
    # UE8M0 keeps the biased exponent: 2^-8 -> 119, 1 -> 127, 2 -> 128, 2^-22 -> 105.
    Vector("ue8m0_rounds_up", Payload.FP8_UE8M0, (0x3F80, 0x3F00), 119, (0x78, 0x70)),
    Vector("ue8m0_exact", Payload.FP8_UE8M0, (0x43E0, 0x3F80), 127, (0x7E, 0x38)),
    Vector("ue8m0_just_above", Payload.FP8_UE8M0, (0x43E1, 0x3F80), 128, (0x76, 0x30)),
    Vector("ue8m0_floor", Payload.FP8_UE8M0, (0x0000,), 105, (0x00,)),
)
