"""The FP8 arithmetic against hand-worked bits, an exact scalar model, and the native implementation."""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Payload
from ep_server.exchange.quant import (
    FP8,
    GROUP,
    dequantise,
    pack_ue8m0,
    quantise,
    round_up_pow2,
    scale_columns,
    unpack_ue8m0,
)
from ep_server.exchange.spec import hidden_multiple
from tests.support.compare import assert_equal
from tests.support.exchange.quant_vectors import VECTORS, Vector
from tests.support.exchange.single import make_single

torch.set_num_threads(1)
FP8 = sorted(FP8)


def bf16(bits: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)


def vector_row(vector: Vector) -> torch.Tensor:
    """[1, H] with the vector in the first group; H is the smallest the payload can carry."""
    row = torch.zeros(1, 512 if vector.payload is Payload.FP8_UE8M0 else GROUP, dtype=torch.bfloat16)
    row[0, : len(vector.inputs)] = bf16(vector.inputs)
    return row


def check_vector(vector: Vector, codes: torch.Tensor, scales: torch.Tensor) -> None:
    shown = codes.view(torch.uint8)[0]
    assert tuple(shown[: len(vector.codes)].tolist()) == vector.codes
    assert not shown[len(vector.codes) :].any()
    first = int(scales.contiguous().view(torch.int32)[0, 0])
    assert (first & 0xFF if vector.payload is Payload.FP8_UE8M0 else first) == vector.scale


def e4m3_value(code: int) -> Fraction:
    """The value of a finite e4m3 code, exactly."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, (code >> 3) & 0xF, code & 7
    if exponent == 0:
        return sign * Fraction(mantissa, 8) / 64
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


POSITIVE = [(e4m3_value(code), code) for code in range(0x7F)]  # 0 .. 448


def e4m3_nearest(value: float) -> int:
    """The code nearest to a float, ties to the even mantissa, saturating: by search, in exact arithmetic."""
    exact = abs(Fraction(value))
    above = bisect_left(POSITIVE, (exact, 0))
    neighbours = POSITIVE[max(0, above - 1) : above + 1]
    best = min(neighbours, key=lambda pair: (abs(pair[0] - exact), pair[1] & 1))[1]
    return best | (0x80 if np.signbit(np.float32(value)) else 0)


def scalar_model(row: list[float], payload: Payload) -> tuple[list[int], np.float32]:
    """One group by numpy float32 scalars and exact search."""
    amax = max(np.float32(1e-4), *(np.float32(abs(x)) for x in row))
    scale, factor = amax / np.float32(448), np.float32(448) / amax
    if payload is not Payload.FP8:
        power = np.float32(1)
        while power < scale:
            power *= np.float32(2)
        while power / np.float32(2) >= scale:
            power /= np.float32(2)
        scale, factor = power, np.float32(1) / power
    return [e4m3_nearest(float(np.float32(x) * factor)) for x in row], scale


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v.name)
class TestVectors:
    def test_torch(self, vector: Vector) -> None:
        check_vector(vector, *quantise(vector_row(vector), vector.payload))

    @pytest.mark.parametrize("implementation", ["reference", "native"])
    def test_on_the_wire(self, vector: Vector, implementation: str) -> None:
        row = vector_row(vector)
        spec = ExchangeSpec(0, 1, (0,), 1, row.shape[1], 1, payload=vector.payload)
        exchange = make_single(spec, implementation)
        received = exchange.dispatch_send(row, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)).recv()
        assert received.scales is not None
        check_vector(vector, received.rows, received.scales)
        exchange.close()


@pytest.mark.parametrize("payload", FP8)
def test_every_bfloat16_exponent_matches_the_scalar_model(payload: Payload) -> None:
    generator = torch.Generator().manual_seed(5)
    for exponent in (-130, -60, -14, -9, -2, 0, 1, 8, 60, 120):
        row = (torch.randn(1, 512, generator=generator) * 2.0**exponent).to(torch.bfloat16)
        codes, scales = quantise(row, payload)
        floats = unpack_ue8m0(scales) if payload is Payload.FP8_UE8M0 else scales
        for group in range(4):
            want_codes, want_scale = scalar_model(row[0, group * 128 :][:128].tolist(), payload)
            assert codes.view(torch.uint8)[0, group * 128 :][:128].tolist() == want_codes
            assert floats[0, group].item() == want_scale


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=128))
def test_any_group_matches_the_scalar_model(values: list[float]) -> None:
    row = torch.zeros(1, GROUP)
    row[0, : len(values)] = torch.tensor(values)
    for payload in (Payload.FP8, Payload.FP8_POW2):
        codes, scales = quantise(row, payload)
        want_codes, want_scale = scalar_model(row[0].tolist(), payload)
        assert codes.view(torch.uint8)[0].tolist() == want_codes
        assert scales.item() == want_scale


@pytest.mark.parametrize("payload", FP8)
def test_values_come_back_within_half_a_step(payload: Payload) -> None:
    x = torch.randn(7, 1024, generator=torch.Generator().manual_seed(1))
    codes, scales = quantise(x, payload)
    back = dequantise(codes, scales)
    floats = unpack_ue8m0(scales) if payload is Payload.FP8_UE8M0 else scales
    # Relative half step of a normal code 2^-4, absolute half step of a subnormal one 2^-10 scales.
    bound = torch.maximum(x.abs() * 2**-4, floats.repeat_interleave(GROUP, 1) * 2**-10) * 1.001
    assert ((back - x).abs() <= bound).all()


@pytest.mark.parametrize("payload", FP8)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_poisoned_group_is_nan_and_its_neighbours_are_not(payload: Payload, poison: float) -> None:
    x = torch.ones(1, 512, dtype=torch.bfloat16)
    x[0, 130] = poison
    back = dequantise(*quantise(x, payload))
    assert back[0, 130].isnan()
    assert back[0, 128:256].isnan().all()
    assert not back[0, :128].isnan().any()
    assert not back[0, 256:].isnan().any()


def test_round_up_pow2_is_exact_around_powers() -> None:
    powers = torch.tensor([2.0**e for e in range(-120, 120)])
    assert_equal(round_up_pow2(powers), powers, "powers stay")
    above = torch.nextafter(powers, torch.tensor(torch.inf))
    assert_equal(round_up_pow2(above), powers * 2, "just above goes up")
    below = torch.nextafter(powers, torch.tensor(0.0))
    assert_equal(round_up_pow2(below), powers, "just below goes up")


def test_ue8m0_packs_the_lowest_channels_lowest() -> None:
    scales = torch.tensor([[2.0**-8, 1.0, 2.0, 2.0**127]])
    packed = pack_ue8m0(scales)
    assert packed.tolist() == [[(119 | 127 << 8 | 128 << 16 | 254 << 24) - (1 << 32)]]
    assert_equal(unpack_ue8m0(packed), scales, "unpacked")
    assert_equal(unpack_ue8m0(packed.expand(3, 1).t().contiguous().t()), scales.expand(3, 4), "strided")


@pytest.mark.parametrize(
    ("payload", "hidden"),
    [(Payload.FP8, 127), (Payload.FP8, 192), (Payload.FP8_POW2, 64), (Payload.FP8_UE8M0, 640)],
)
def test_rows_that_a_payload_cannot_carry(payload: Payload, hidden: int) -> None:
    with pytest.raises(InvalidArgument, match=f"hidden.*{hidden_multiple(payload)}"):
        quantise(torch.zeros(1, hidden), payload)


def test_no_rows_at_all() -> None:
    for payload in FP8:
        codes, scales = quantise(torch.zeros(0, 1024), payload)
        assert codes.shape == (0, 1024)
        assert scales.shape == (0, scale_columns(1024, payload))
        assert dequantise(codes, scales).shape == (0, 1024)


def test_scale_columns() -> None:
    assert [scale_columns(1024, payload) for payload in Payload] == [0, 0, 8, 8, 2]
