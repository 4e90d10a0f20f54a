"""Layout of an exchange buffer: no two things overlap, every slot is aligned; checked on the host alone."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_server import _C
from ep_server.errors import ConfigError, StartupError
from ep_server.exchange import spec as limits
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction
from ep_server.exchange.host import open_shm
from ep_server.exchange.segment import create_segment
from ep_server.exchange.spec import geometry_of, group_bytes
from ep_server.testing.reference_exchange import ReferenceExchange

WIDTH = {Payload.FP32: 4, Payload.BF16: 2}


@st.composite
def specs(draw: st.DrawFn) -> ExchangeSpec:
    payload = draw(st.sampled_from(Payload))
    multiple = 512 if payload == Payload.FP8_UE8M0 else 1 if payload in WIDTH else 128
    num_ranks = draw(st.integers(1, 64))
    return ExchangeSpec(
        rank=draw(st.integers(0, num_ranks - 1)),
        num_ranks=num_ranks,
        placement=tuple(draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=80))),
        max_tokens=draw(st.integers(1, 9)),
        hidden=draw(st.integers(1, 5)) * multiple,
        top_k=draw(st.integers(1, 16)),
        payload=payload,
        reduction=draw(st.sampled_from(Reduction)),
        num_banks=draw(st.sampled_from((2, 4))),
    )


def combine_slots(spec: ExchangeSpec, layout: _C.Layout) -> list[tuple[str, int, int]]:
    """The slots of one reduction: RANK and SOURCE share the region, an operation uses one of them."""
    slots = []
    for bank in range(spec.num_banks):
        for token in range(spec.max_tokens):
            if spec.reduction == Reduction.RANK:
                starts = [layout.rank_sum_at(bank, r, token) for r in range(spec.num_ranks)]
            else:
                choices = itertools.product(range(spec.num_ranks), range(spec.top_k))
                starts = [layout.choice_at(bank, r, token, k) for r, k in choices]
            slots += [("combine", start, start + layout.combine_bytes) for start in starts]
    return slots


@settings(max_examples=40, deadline=None)
@given(specs())
def test_regions_are_disjoint_aligned_and_inside(spec: ExchangeSpec) -> None:
    layout = _C.Layout(geometry_of(spec))
    regions = sorted(layout.regions() + combine_slots(spec, layout), key=lambda region: region[1])
    for (name, begin, end), (after, next_begin, _) in itertools.pairwise(regions):
        assert begin < end <= next_begin, (name, after)
        assert begin % (4 if name == "weights" else _C.LINE_BYTES) == 0, name
    assert regions[-1][2] <= layout.total
    assert layout.total % 4096 == 0
    assert group_bytes(spec) == layout.region(spec.num_ranks - 1) + layout.total


@settings(max_examples=40, deadline=None)
@given(specs())
def test_rows_hold_channels_and_scales(spec: ExchangeSpec) -> None:
    layout = _C.Layout(geometry_of(spec))
    scales = {Payload.FP8: spec.hidden // 128 * 4, Payload.FP8_POW2: spec.hidden // 128 * 4}
    scales[Payload.FP8_UE8M0] = spec.hidden // 128
    assert layout.row_bytes == spec.hidden * WIDTH.get(spec.payload, 1)
    assert layout.scale_bytes == scales.get(spec.payload, 0)
    assert layout.scale_offset % 4 == 0 or layout.scale_bytes == 0
    assert 0 <= layout.row_pitch - layout.row_bytes - layout.scale_bytes < 64


@settings(max_examples=40, deadline=None)
@given(specs())
def test_both_reductions_fit_where_the_spec_says_source(spec: ExchangeSpec) -> None:
    layout = _C.Layout(geometry_of(spec))
    last_bank, last_token = spec.num_banks - 1, spec.max_tokens - 1
    ends = [layout.rank_sum_at(last_bank, spec.num_ranks - 1, last_token)]
    if spec.reduction == Reduction.SOURCE:
        ends.append(layout.choice_at(last_bank, spec.num_ranks - 1, last_token, spec.top_k - 1))
    assert max(ends) + layout.combine_bytes <= layout.total


def test_the_head_does_not_depend_on_the_model() -> None:
    small = ExchangeSpec(0, 1, (0,), 1, 1, 1)
    large = ExchangeSpec(0, 64, tuple(range(64)), 9, 4096, 16, num_banks=16)
    heads = []
    for spec in (small, large):
        layout = _C.Layout(geometry_of(spec))
        assert layout.meta == _C.HEAD_BYTES
        heads.append([region for region in layout.regions() if region[1] < _C.HEAD_BYTES])
    assert heads[0] == heads[1]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("num_ranks", {"num_ranks": 65}),
        ("rank", {"rank": 2}),
        ("max_tokens", {"max_tokens": 0}),
        ("hidden", {"hidden": 0}),
        ("hidden", {"payload": Payload.FP8, "hidden": 192}),
        ("hidden", {"payload": Payload.FP8_UE8M0, "hidden": 1280}),
        ("top_k", {"top_k": 17}),
        ("num_banks", {"num_banks": 3}),
        ("num_banks", {"num_banks": 1}),
        ("num_banks", {"num_banks": 32}),
        ("placement", {"placement": ()}),
        (r"placement\[1\]", {"placement": (0, 2)}),
        ("timeout_ns", {"timeout_ns": 0}),
        ("max_tokens", {"max_tokens": (1 << 24) + 1}),
        ("max_tokens", {"num_ranks": 64, "max_tokens": 1 << 22, "top_k": 16}),
        ("max_tokens", {"max_tokens": 2.0}),
        ("hidden", {"hidden": (1 << 20) + 1}),
        ("top_k", {"top_k": True}),
    ],
)
def test_what_the_format_cannot_carry_names_the_field(field: str, change: dict[str, object]) -> None:
    good = {"rank": 0, "num_ranks": 2, "placement": (0, 1), "max_tokens": 4, "hidden": 256, "top_k": 2}
    with pytest.raises(ConfigError, match=f"^{field} = ") as error:
        geometry_of(ExchangeSpec(**{**good, **change}))  # type: ignore[arg-type]
    assert "must be" in str(error.value)
    with pytest.raises(ConfigError) as same:
        ReferenceExchange(ExchangeSpec(**{**good, **change}))  # type: ignore[arg-type]
    assert str(same.value) == str(error.value)


def test_the_largest_sizes_do_not_wrap() -> None:
    spec = ExchangeSpec(0, 64, (0,), (1 << 25) // 16, 1 << 20, 16, Payload.FP32, Reduction.SOURCE, 16)
    with pytest.raises(ConfigError, match=r"max_tokens = 2097152: must be less: \d{19,} bytes"):
        group_bytes(spec)
    assert group_bytes(replace(spec, hidden=1 << 18)) > 1 << 60
    entries = ExchangeSpec(0, 8, (0,), 1 << 24, 1, 16)
    assert group_bytes(entries) > 1 << 32
    with pytest.raises(ConfigError, match="max_tokens = 16777216: must be at most 14913080"):
        group_bytes(replace(entries, num_ranks=9))


def test_native_code_has_the_same_limits() -> None:
    native = (_C.MAX_RANKS, _C.MAX_BANKS, _C.MAX_TOP_K, _C.VOTE_BYTES)
    assert native == (limits.MAX_RANKS, limits.MAX_BANKS, limits.MAX_TOP_K, limits.RECORD_BYTES)


def test_too_little_memory_is_said_with_numbers() -> None:
    spec = ExchangeSpec(0, 64, tuple(range(64)), 1 << 20, 8192, 8)
    with pytest.raises(StartupError, match=r"64 ranks needs [\d.]+ MiB .* [\d.]+ MiB are available"):
        create_segment(spec)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("hidden", {"hidden": 96}),
        ("placement", {"placement": (0, 0)}),
        ("payload", {"payload": Payload.FP32}),
    ],
)
def test_a_rank_that_differs_from_its_group_is_refused(field: str, change: dict[str, object]) -> None:
    good = {"rank": 0, "num_ranks": 2, "placement": (0, 1), "max_tokens": 4, "hidden": 64, "top_k": 2}
    fd = create_segment(ExchangeSpec(**good))  # type: ignore[arg-type]
    try:
        with pytest.raises(ConfigError, match=f"^{field} = .*as in the segment of the group"):
            open_shm(ExchangeSpec(**{**good, **change}), fd=fd)  # type: ignore[arg-type]
    finally:
        os.close(fd)


def test_a_descriptor_that_is_no_segment_is_refused() -> None:
    spec = ExchangeSpec(0, 1, (0,), 1, 8, 1)
    fd = os.memfd_create("something else")
    os.ftruncate(fd, 8192)
    try:
        with pytest.raises(StartupError, match="not an exchange segment"):
            open_shm(spec, fd)
    finally:
        os.close(fd)
    with pytest.raises(StartupError, match="Bad file descriptor"):
        open_shm(spec, fd)
