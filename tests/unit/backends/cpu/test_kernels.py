"""The native kernels against plain float64 torch, on every instruction set that runs here.

Tolerances are those of one rounding of the result plus, for the FFN, one of the intermediate rows.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from ep_server import _C
from ep_server.backends.cpu.native_compute import NativeCompute
from ep_server.backends.torch_compute import TorchCompute
from ep_server.errors import InternalError
from ep_server.models.batch import AttentionMeta
from ep_server.models.kv_cache import KvLayer

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}

each_isa = pytest.mark.parametrize("isa", _C.compute_isas())
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    assert got.dtype is dtype and got.shape == expected.shape
    difference = (got.double() - expected).abs()
    assert bool((difference <= TOLERANCE[dtype] * factor * (1 + expected.abs())).all()), float(
        difference.max()
    )


@each_isa
@each_dtype
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 64, 64), (7, 65, 31), (13, 3, 1), (6, 200, 130), (32, 96, 512), (0, 5, 8)]
)
def test_linear(isa: str, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    weight, x, bias = (
        random(n, k, dtype=dtype),
        random(rows, k, dtype=dtype, seed=1),
        random(n, dtype=dtype, seed=2),
    )
    compute = NativeCompute(isa=isa)
    exact = x.double() @ weight.double().t()
    assert_near(compute.linear(weight)(x), exact, dtype, k**0.5)
    assert_near(compute.linear(weight, bias)(x), exact + bias.double(), dtype, k**0.5)
    unrounded = compute.linear(weight, bias).unrounded(x)
    assert_near(unrounded, exact + bias.double(), torch.float32, k**0.5)
    assert torch.equal(unrounded.to(dtype), compute.linear(weight, bias)(x))


@each_isa
@each_dtype
@pytest.mark.parametrize(
    ("rows", "heads", "k", "n"), [(1, 4, 64, 64), (7, 3, 31, 65), (13, 2, 12, 24), (0, 2, 8, 8)]
)
def test_linear_of_each_head(isa: str, dtype: torch.dtype, rows: int, heads: int, k: int, n: int) -> None:
    """Rows have a pitch, as a slice of wider heads has; what lies between them is never read."""
    weight, wide = (
        random(heads, k, n, dtype=dtype),
        torch.full((rows, heads, k + 3), float("nan"), dtype=dtype),
    )
    wide[..., :k] = random(rows, heads, k, dtype=dtype, seed=1)
    x = wide[..., :k]
    exact = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    assert_near(NativeCompute(isa=isa).head_linear(weight)(x), exact, dtype, k**0.5)
    assert_near(TorchCompute().head_linear(weight)(x), exact, dtype, k**0.5)


@each_dtype
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_logits_of_torch_into_memory_that_is_there(dtype: torch.dtype, biased: bool, rows: int) -> None:
    weight, x, bias = (random(*shape, dtype=dtype, seed=3) for shape in ((65, 33), (rows, 33), (65,)))
    linear = TorchCompute().linear(weight, bias if biased else None)
    out = torch.full((rows + 2, 65), float("nan"))
    linear.write_unrounded(x, out[:rows])
    exact = x.double() @ weight.double().t() + biased * bias.double()
    assert_near(out[:rows].to(dtype), exact, dtype, 33**0.5)
    assert bool(out[rows:].isnan().all()) and torch.equal(linear.unrounded(x), out[:rows])


@each_dtype
@pytest.mark.parametrize("k", [64, 33])
def test_linear_of_rows_with_a_pitch_reads_only_the_rows(dtype: torch.dtype, k: int) -> None:
    wide = torch.full((5, k + 7), float("nan"), dtype=dtype)
    wide[:, :k] = random(5, k, dtype=dtype)
    weight = random(40, k, dtype=dtype, seed=1)
    got = NativeCompute().linear(weight)(wide[:, :k])
    assert torch.equal(got, NativeCompute().linear(weight)(wide[:, :k].contiguous()))
    assert bool(got.isfinite().all())


def ffn_oracle(
    x: torch.Tensor, offsets: list[int], gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.float64)
    for e in range(len(down)):
        rows = x[offsets[e] : offsets[e + 1]].double()
        gate, up = (rows @ gate_up[e].double().t()).chunk(2, dim=-1)
        gated = (torch.nn.functional.silu(gate) * up).to(x.dtype).double()
        out[offsets[e] : offsets[e + 1]] = gated @ down[e].double().t()
    return out


@each_isa
@each_dtype
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("offsets", "hidden", "ffn"),
    [
        ([0, 1, 1, 8, 8], 64, 32),  # experts without rows between and at the end
        ([0, 0, 13], 33, 20),  # nothing is a multiple of anything
        ([0, 5, 7], 130, 1),
        ([0, 0, 0], 64, 32),  # no rows at all
        ([0, 40], 128, 96),  # one expert, as a dense FFN
    ],
)
def test_gated_ffn(
    isa: str, dtype: torch.dtype, threads: int, offsets: list[int], hidden: int, ffn: int
) -> None:
    experts = len(offsets) - 1
    gate_up = random(experts, 2 * ffn, hidden, dtype=dtype, scale=hidden**-0.5)
    down = random(experts, hidden, ffn, dtype=dtype, seed=1, scale=ffn**-0.5)
    x = random(offsets[-1], hidden, dtype=dtype, seed=2)
    native = NativeCompute(threads, isa).gated_ffn(gate_up, down)
    got = native(x, torch.tensor(offsets))
    assert_near(got, ffn_oracle(x, offsets, gate_up, down), dtype, 4)
    plain = TorchCompute().gated_ffn(gate_up, down)(x, torch.tensor(offsets))
    assert_near(got, plain.double(), dtype, 8)


@each_isa
@each_dtype
@pytest.mark.parametrize(("rows", "heads", "dim"), [(5, 0, 64), (3, 4, 64), (2, 3, 21), (0, 0, 8), (1, 1, 1)])
def test_rms_norm(isa: str, dtype: torch.dtype, rows: int, heads: int, dim: int) -> None:
    """heads 0: one norm over the row. Rows lie in wider ones, whose rest is NaN."""
    shape = (heads, dim) if heads else (dim,)
    width = max(heads, 1) * dim
    wide = torch.full((rows, width + 5), float("nan"), dtype=dtype)
    wide[:, :width] = random(rows, width, dtype=dtype, scale=3.0)
    x = wide[:, :width].view(rows, *shape) if heads else wide[:, :width]
    weight = random(*shape, dtype=dtype, seed=1)
    got = NativeCompute(isa=isa).rms_norm(x, weight, 1e-6)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert got.is_contiguous()
    assert_near(got, exact, dtype)
    assert_near(TorchCompute().rms_norm(x, weight, 1e-6), exact, dtype, 2)


def test_threads_that_end_before_their_first_job_end() -> None:
    """A worker that first looks for work while its pool is destroyed must not go to sleep."""
    program = "from ep_server import _C\nfor _ in range(5000): _C.Compute(3, 'auto')"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_silu_at_its_ends() -> None:
    """Gates of +-200 and NaN: large gates pass, very negative ones vanish, NaN stays NaN in its row alone."""
    gate = torch.tensor([[200.0], [-200.0], [float("nan")], [0.0]])
    ffn = NativeCompute().gated_ffn(torch.ones(1, 2, 1), torch.ones(1, 1, 1))
    got = ffn(gate, torch.tensor([0, 4]))[:, 0]
    assert got[0] == 200.0 * 200.0 and got[1] == 0.0 and bool(got[2].isnan()) and got[3] == 0.0


@dataclass(frozen=True)
class Paged:
    """A cache whose every position that belongs to no sequence is NaN."""

    kv: KvLayer
    meta: AttentionMeta
    q: torch.Tensor

    @staticmethod
    def of(lengths: list[tuple[int, int]], heads: tuple[int, int], dims: tuple[int, int | None], block: int,
           dtype: torch.dtype) -> Paged:  # fmt: skip
        """lengths: (context, rows of this step) per sequence. dims: k_dim, v_dim or None for latent."""
        generator = torch.Generator().manual_seed(3)
        (k_dim, v_dim), (q_heads, kv_heads) = dims, heads
        width = max(-(-context // block) for context, _ in lengths)
        ids = torch.randperm(len(lengths) * width + 2, generator=generator)[: len(lengths) * width]
        table = ids.view(len(lengths), width)
        k = torch.full((len(lengths) * width + 2, block, kv_heads, k_dim), float("nan"), dtype=dtype)
        v = None if v_dim is None else torch.full((*k.shape[:3], v_dim), float("nan"), dtype=dtype)
        for row, (context, _) in zip(table, lengths, strict=True):
            at = torch.arange(context)
            slots = row[at // block] * block + at % block
            for cache in (k, v):
                if cache is not None:
                    cache.flatten(0, 1)[slots] = torch.randn(
                        context, kv_heads, cache.shape[3], generator=generator
                    ).to(dtype)
        starts, positions = [0], []
        for context, rows in lengths:
            starts.append(starts[-1] + rows)
            positions += range(context - rows, context)
        at = torch.tensor(positions)
        meta = AttentionMeta(
            num_decode=sum(rows == 1 for _, rows in lengths),
            query_start=tuple(starts),
            context=tuple(context for context, _ in lengths),
            blocks=table,
            block_size=block,
            positions=at,
            slots=torch.zeros(len(at), dtype=torch.int64),
        )
        # Queries are a slice of wider rows, as they are of q, k and v together.
        wide = torch.randn(len(at), q_heads + 1, k_dim, generator=generator).to(dtype)
        return Paged(KvLayer(k, v, v_dim or k_dim - 3), meta, wide[:, :q_heads])

    def oracle(self, window: int, scale: float) -> torch.Tensor:
        """Row by row, head by head, in float64."""
        meta, kv = self.meta, self.kv
        out = torch.empty(*self.q.shape[:2], kv.v_dim, dtype=torch.float64)
        group = self.q.shape[1] // kv.k.shape[2]
        for s, (begin, end) in enumerate(zip(meta.query_start, meta.query_start[1:], strict=False)):
            for row in range(begin, end):
                last = int(meta.positions[row])
                at = torch.arange(max(0, last - window + 1) if window else 0, last + 1)
                slots = meta.blocks[s][at // meta.block_size] * meta.block_size + at % meta.block_size
                k = kv.k.flatten(0, 1)[slots].double()
                v = k if kv.v is None else kv.v.flatten(0, 1)[slots].double()
                for head in range(self.q.shape[1]):
                    weights = torch.softmax(k[:, head // group] @ self.q[row, head].double() * scale, 0)
                    out[row, head] = weights @ v[:, head // group, : kv.v_dim]
        return out


@each_isa
@each_dtype
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize(
    ("lengths", "heads", "dims", "block"),
    [
        ([(1, 1), (16, 1), (65, 1), (130, 1)], (8, 2), (64, 64), 16),
        ([(3, 1), (77, 20), (5, 5)], (7, 1), (20, 12), 5),  # odd group and widths, decode before prefill
        ([(40, 1), (23, 2)], (3, 3), (16, 16), 16),  # one query head per KV head
        ([(50, 1), (66, 3)], (6, 1), (40, None), 7),  # latent: values are a part of the keys
    ],
    ids=("gqa", "odd", "mha", "latent"),
)
def test_attention(
    isa: str,
    dtype: torch.dtype,
    threads: int,
    window: int,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int | None],
    block: int,
) -> None:
    case = Paged.of(lengths, heads, dims, block, dtype)
    got = NativeCompute(threads, isa).attend(case.meta, window, dtype)(case.q, case.kv, 0.3)
    assert_near(got, case.oracle(window, 0.3), dtype, 2)


@each_isa
@each_dtype
def test_rows_do_not_depend_on_their_batch(isa: str, dtype: torch.dtype) -> None:
    """Alone, in any batch, at any place, on any number of threads: the same bits."""
    x = random(33, 96, dtype=dtype)
    one, many = NativeCompute(1, isa), NativeCompute(3, isa)
    weight = random(70, 96, dtype=dtype, seed=1)
    gate_up, down = random(1, 64, 96, dtype=dtype, seed=2), random(1, 96, 32, dtype=dtype, seed=3)
    linear, ffn = one.linear(weight), one.gated_ffn(gate_up, down)
    for threaded in (many.linear(weight), linear):
        whole = threaded(x)
        assert all(torch.equal(whole[a:b], linear(x[a:b])) for a, b in ((0, 1), (5, 9), (9, 33), (32, 33)))
    whole = many.gated_ffn(gate_up, down)(x, torch.tensor([0, 33]))
    assert all(
        torch.equal(whole[a:b], ffn(x[a:b], torch.tensor([0, b - a]))) for a, b in ((0, 1), (5, 9), (9, 33))
    )
    by_head = random(4, 24, 40, dtype=dtype, seed=4)
    heads, alone = x.view(33, 4, 24), one.head_linear(by_head)
    whole = many.head_linear(by_head)(heads)
    assert all(torch.equal(whole[a:b], alone(heads[a:b])) for a, b in ((0, 1), (5, 9), (9, 33)))
    case = Paged.of([(90, 1), (17, 1), (33, 1)], (8, 2), (64, 64), 16, dtype)
    together = many.attend(case.meta, 0, dtype)(case.q, case.kv, 0.3)
    for s in range(3):
        meta = AttentionMeta(
            1, (0, 1), case.meta.context[s : s + 1], case.meta.blocks[s : s + 1].contiguous(), 16,
            case.meta.positions[s : s + 1].clone(), case.meta.slots[s : s + 1],
        )  # fmt: skip
        single = one.attend(meta, 0, dtype)(case.q[s : s + 1].clone(), case.kv, 0.3)
        assert torch.equal(single[0], together[s])


def test_many_short_jobs_on_threads() -> None:
    """Workers that fall asleep between jobs, or arrive late, neither skip one nor run one twice."""
    weight, x = random(640, 8, dtype=torch.float32), random(2, 8, dtype=torch.float32, seed=1)
    linear = NativeCompute(4).linear(weight)
    expected = linear(x)
    for _ in range(2000):
        assert torch.equal(linear(x), expected)


def test_wrong_inputs_are_named() -> None:
    compute = NativeCompute()
    linear = compute.linear(torch.zeros(4, 8))
    with pytest.raises(InternalError, match=r"x: torch.float32 \[2, 7\]"):
        linear(torch.zeros(2, 7))
    with pytest.raises(InternalError, match="bfloat16"):
        linear(torch.zeros(2, 8, dtype=torch.bfloat16))
    ffn = compute.gated_ffn(torch.zeros(2, 8, 4), torch.zeros(2, 4, 4))
    with pytest.raises(InternalError, match="offsets"):
        ffn(torch.zeros(3, 4), torch.tensor([0, 3]))
    for offsets in ([0, 4, 3], [1, 2, 3], [0, 1, 4]):
        with pytest.raises(ValueError, match="ascend from 0 to 3"):
            ffn(torch.zeros(3, 4), torch.tensor(offsets))
    with pytest.raises(InternalError, match="weight"):
        compute.linear(torch.zeros(8, 4).t())
    with pytest.raises(InternalError, match=r"x: .* expected torch.float32 \[T, 2, 4\]"):
        compute.head_linear(torch.zeros(2, 4, 8))(torch.zeros(3, 4, 2))
    with pytest.raises(ValueError, match="isa = 'mmx': must be one of auto"):
        NativeCompute(isa="mmx")
