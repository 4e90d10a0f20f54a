from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.backends.gpu.kernels.triton.rope import HeadNorm, MlaInput, Rotation, store_gqa, store_mla
from ep_server.errors import InternalError
from ep_server.models.attention import rotation_table
from ep_server.models.families.spec import RopeSpec
from ep_server.models.kv_cache import KvLayer
from tests.support.triton.harness import (
    DEVICE,
    FP8,
    NAN,
    assert_near,
    assert_same_codes,
    codes,
    in_parts,
    poisoned,
    random,
)

EPS = 1e-4
# Slots of four tokens in blocks of 5, the third a padding token; positions are unrelated to them.
SLOTS, POSITIONS = (7, 0, -1, 13), (3, 0, 1 << 40, 9)
REAL = [0, 1, 3]

each_cache = pytest.mark.parametrize(
    ("dtype", "cache"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8)],
    ids=("float32", "bfloat16", "fp8"),
)
each_pairing = pytest.mark.parametrize("interleaved", [True, False], ids=("adjacent", "halves"))


def rotation(dim: int, interleaved: bool) -> Rotation:
    table = torch.view_as_real(rotation_table(RopeSpec(dim, 100.0, attention_factor=1.25), 16)).contiguous()
    return Rotation(
        table.to(DEVICE),
        torch.tensor(POSITIONS, device=DEVICE),
        torch.tensor(SLOTS, device=DEVICE),
        interleaved,
    )


def rotated(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x: [real tokens, heads, dim] in float64, pair by pair."""
    dim = x.shape[-1]
    table = rotation_table(RopeSpec(dim, 100.0, attention_factor=1.25), 16)
    turn = table[[POSITIONS[t] for t in REAL]].to(torch.complex128).to(x.device)[:, None]
    first = slice(0, dim, 2) if interleaved else slice(0, dim // 2)
    second = slice(1, dim, 2) if interleaved else slice(dim // 2, dim)
    product = torch.complex(x[..., first], x[..., second]) * turn
    out = torch.empty_like(x)
    out[..., first], out[..., second] = product.real, product.imag
    return out


def empty_cache(heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((3, 5, heads, dim), NAN, device=DEVICE).to(dtype)


def assert_stored(cache: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor | None) -> None:
    """The real tokens' slots hold `expected`; every other slot is as it was: NaN."""
    slots = cache.flatten(0, 1)
    written = [SLOTS[t] for t in REAL]
    if scale is None:
        assert_near(slots[written], expected)
    else:
        assert_same_codes(slots[written], codes(expected, scale[:, None]))
    others = [s for s in range(len(slots)) if s not in written]
    assert bool(slots[others].float().isnan().all())


@dataclass
class Gqa:
    heads: int
    kv_heads: int
    dim: int
    norm: bool = False
    clip: float = 0.0


@each_cache
@each_pairing
@pytest.mark.parametrize(
    "case", [Gqa(6, 2, 16, norm=True), Gqa(5, 5, 12, clip=0.8), Gqa(7, 1, 20, norm=True, clip=1.5)], ids=str
)
def test_store_gqa(case: Gqa, dtype: torch.dtype, cache: torch.dtype, interleaved: bool) -> None:
    """A padding token is of NaN, has a position far outside, and leaves q and the cache as they were."""
    heads, kv_heads, dim = case.heads, case.kv_heads, case.dim
    qkv = poisoned(random(4, (heads + 2 * kv_heads) * dim, dtype=dtype), 3)
    qkv[2] = NAN
    weight = random(heads + kv_heads, dim, dtype=dtype, seed=1)
    scales = (
        [torch.rand(kv_heads, device=DEVICE) * 0.02 + 0.002 for _ in "kv"] if cache is FP8 else [None] * 2
    )
    layer = KvLayer(empty_cache(kv_heads, dim, cache), empty_cache(kv_heads, dim, cache), dim)
    q_out = torch.full((4, heads, dim), NAN, dtype=dtype, device=DEVICE)
    norm = HeadNorm(weight, EPS) if case.norm else None
    store_gqa(qkv, q_out, PagedKv(layer, *scales), rotation(dim, interleaved), norm, case.clip)

    x = qkv[REAL].double().unflatten(1, (-1, dim))
    x = x.clamp(-case.clip, case.clip) if case.clip else x
    qk, v = x[:, : heads + kv_heads], x[:, heads + kv_heads :]
    if case.norm:
        qk = qk / (qk.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    qk = rotated(qk, interleaved)
    assert_near(q_out[REAL], qk[:, :heads])
    assert bool(q_out[2].isnan().all())
    assert_stored(layer.k, qk[:, heads:], scales[0])
    assert_stored(layer.v, v, scales[1])


@each_cache
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_store_gqa_of_partial_sums(parts: int, dtype: torch.dtype, cache: torch.dtype) -> None:
    """As of the product, rounded once: to what the queries are of."""
    given, product = in_parts(parts, 4, (5 + 2 * 2) * 16)
    given.sums[:, 2] = NAN
    norm = HeadNorm(random(7, 16, dtype=dtype, seed=1), EPS)
    scales = [torch.full((2,), 0.01, device=DEVICE) if cache is FP8 else None for _ in "kv"]
    found = []
    for qkv in (given, product.to(dtype)):
        layer = KvLayer(empty_cache(2, 16, cache), empty_cache(2, 16, cache), 16)
        q = torch.full((4, 5, 16), NAN, dtype=dtype, device=DEVICE)
        store_gqa(qkv, q, PagedKv(layer, *scales), rotation(16, True), norm)
        found.append((q, layer))
    (q, layer), (wanted, plain) = found
    assert_near(q[REAL], wanted[REAL].double())
    assert bool(q[2].isnan().all())
    slots = [SLOTS[t] for t in REAL]
    for a, b in ((layer.k, plain.k), (layer.v, plain.v)):
        stored, expected = a.flatten(0, 1)[slots], b.flatten(0, 1)[slots]
        if cache is FP8:
            assert_same_codes(stored, expected)
        else:
            assert_near(stored, expected.double())


@each_cache
@each_pairing
@pytest.mark.parametrize(("heads", "latent", "dim", "nope"), [(5, 24, 8, 6), (4, 20, 6, 3), (1, 32, 16, 0)])
def test_store_mla(
    heads: int, latent: int, dim: int, nope: int, dtype: torch.dtype, cache: torch.dtype, interleaved: bool
) -> None:
    """Reads the views that the projections leave, writes the last channels of wider queries."""
    down = random(4, 7 + latent + dim, dtype=dtype)
    q = random(4, heads, nope + dim, dtype=dtype, seed=1)
    down[2], q[2], q[..., :nope] = NAN, NAN, NAN
    norm = random(latent, dtype=dtype, seed=2)
    scale = torch.full((1,), 0.01, device=DEVICE) if cache is FP8 else None
    layer = KvLayer(empty_cache(1, latent + dim, cache), None, latent)
    q_out = torch.full((4, heads, latent + dim), 7.0, dtype=dtype, device=DEVICE)
    x = MlaInput(down[:, 7 : 7 + latent], down[:, 7 + latent :], q[..., nope:], norm, EPS)
    store_mla(x, q_out[..., latent:], PagedKv(layer, scale), rotation(dim, interleaved))

    real = down[REAL].double()
    normed = real[:, 7 : 7 + latent]
    normed = normed / (normed.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    keys = rotated(real[:, None, 7 + latent :], interleaved)
    assert_stored(layer.k, torch.cat([normed[:, None], keys], dim=2), scale)
    assert_near(q_out[REAL][..., latent:], rotated(q[REAL][..., nope:].double(), interleaved))
    assert bool((q_out[..., :latent] == 7).all()) and bool((q_out[2] == 7).all())


def test_fp8_saturates_and_keeps_nan() -> None:
    layer = KvLayer(empty_cache(1, 2, FP8), empty_cache(1, 2, FP8), 2)
    layer.k.zero_()
    layer.v.zero_()
    one = torch.ones(1, device=DEVICE)
    qkv = torch.tensor([[1.0, 1, 1e9, -1e9, NAN, 3]] * 4, device=DEVICE)
    turn = rotation(2, True)
    turn.table[..., 0], turn.table[..., 1] = 1.0, 0.0
    store_gqa(qkv, torch.empty(4, 1, 2, device=DEVICE), PagedKv(layer, one, one), turn)
    assert layer.k.flatten(0, 1)[7, 0].tolist() == [448, -448]
    assert str(layer.v.flatten(0, 1)[7, 0].tolist()) == "[nan, 3.0]"


def test_no_tokens() -> None:
    layer = KvLayer(empty_cache(1, 8, torch.float32), empty_cache(1, 8, torch.float32), 8)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    turn = Rotation(rotation(8, True).table, none, none)
    store_gqa(random(0, 32), random(0, 2, 8), PagedKv(layer), turn)
    latent = KvLayer(empty_cache(1, 20, torch.float32), None, 12)
    x = MlaInput(random(0, 12), random(0, 8), random(0, 2, 8), random(12), EPS)
    store_mla(x, random(0, 2, 20)[..., 12:], PagedKv(latent), turn)
    assert bool(layer.k.isnan().all()) and bool(latent.k.isnan().all())


def test_wrong_inputs_are_named() -> None:
    layer = KvLayer(empty_cache(2, 8, torch.float32), empty_cache(2, 8, torch.float32), 8)
    turn, q_out = rotation(8, True), torch.empty(4, 4, 8, device=DEVICE)
    with pytest.raises(InternalError, match=r"qkv: .* \[4, 65\].*\[4, 64\]"):
        store_gqa(random(4, 65), q_out, PagedKv(layer), turn)
    with pytest.raises(InternalError, match="k_scale: must be None"):
        store_gqa(random(4, 64), q_out, PagedKv(layer, torch.ones(2)), turn)
    with pytest.raises(InternalError, match="positions"):
        store_gqa(random(4, 64), q_out, PagedKv(layer), Rotation(turn.table, turn.positions[:3], turn.slots))
    with pytest.raises(InternalError, match="head_dim = 6"):
        store_gqa(random(4, 64), q_out[..., :6], PagedKv(layer), turn)
    with pytest.raises(InternalError, match="without v"):
        store_mla(MlaInput(random(4, 12), random(4, 8), q_out, random(12), EPS), q_out, PagedKv(layer), turn)
