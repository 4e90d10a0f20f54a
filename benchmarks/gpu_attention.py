"""Paged decode attention of one layer on one GPU: ours, FlashInfer's where it can run, and the bound.

    python3 benchmarks/gpu_attention.py --batch 64,128,256 --context 256,1024 [--latent] [--sweep]

Both run as a rank runs them, in a graph, caches rotated past L2, and each result is checked against torch
first. Times in microseconds, median of replays. --sweep times other tiles of ours too.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpu_timing import BF16, RATE, arguments, in_graph

from ep_server.backends.gpu.attention.choice import AttentionCase, Chosen, choose
from ep_server.backends.gpu.attention.decode_kernels import DecodeKernels
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_decode import DecodeTile, Workspace, decode
from ep_server.errors import ConfigError
from ep_server.models.families.spec import GqaSpec, MlaSpec
from ep_server.models.kv_cache import KvLayer
from ep_server.models.sizes import Dtype

BLOCK = 16  # positions


@dataclass(frozen=True)
class Shape:
    """heads: of queries. latent: 512 + 64 channels that all heads share, else kv_heads of 128."""

    heads: int
    kv_heads: int
    latent: bool

    @property
    def dims(self) -> tuple[int, int]:
        """Channels of a key, of a value."""
        return (576, 512) if self.latent else (128, 128)

    def chosen(self, asked: str, longest: int) -> Chosen:
        """Kernels as a rank takes them. Raises: ConfigError."""
        spec: GqaSpec | MlaSpec = GqaSpec(self.heads, self.kv_heads, 128, 128**-0.5)
        if self.latent:
            spec = MlaSpec(self.heads, 0, 512, 128, 64, 128, 576**-0.5)
        dtypes = (Dtype.BFLOAT16, Dtype.BFLOAT16)
        return choose(asked, AttentionCase.on(torch.device("cuda", 0), spec, dtypes, BLOCK, longest))


class Case:
    """Sequences of equal length, their blocks in no order."""

    def __init__(self, shape: Shape, batch: int, context: int, sets: int) -> None:
        self.shape, self.context = shape, context
        (k_dim, v_dim), held = shape.dims, -(-context // BLOCK)
        size = (batch * held, BLOCK, shape.kv_heads)
        self.caches = [
            PagedKv(
                KvLayer(
                    torch.randn(*size, k_dim, device="cuda", dtype=BF16),
                    None if shape.latent else torch.randn(*size, v_dim, device="cuda", dtype=BF16),
                    v_dim,
                )
            )
            for _ in range(sets)
        ]
        blocks = torch.randperm(batch * held, device="cuda").int().view(batch, held)
        self.sequences = Sequences(blocks, torch.full((batch,), context, dtype=torch.int32, device="cuda"))
        self.q = torch.randn(batch, shape.heads, k_dim, device="cuda", dtype=BF16)
        self.out = torch.full((batch, shape.heads, v_dim), float("nan"), device="cuda", dtype=BF16)
        self.rule = AttentionRule(k_dim**-0.5)

    def run(self, tile: DecodeTile, splits: int, which: int) -> None:
        """One layer."""
        space = Workspace.of(len(self.q), self.shape.heads, splits, self.out.shape[2], self.q.device)
        decode(self.q, self.caches[which], self.sequences, self.rule, space, self.out, tile)

    def took(self, kernels: DecodeKernels) -> float:
        """us of a layer, once its result is right."""
        layer = kernels.over(self.sequences)
        self.out.fill_(float("nan"))
        layer(self.q, self.caches[0], self.rule, self.out)
        assert self.error() < 0.01, self.error()
        return in_graph(lambda which: layer(self.q, self.caches[which], self.rule, self.out), self.sets)

    @property
    def sets(self) -> int:
        """Caches."""
        return len(self.caches)

    def error(self) -> float:
        """Of `out`, against torch on the first set."""
        layer, index = self.caches[0].layer, self.sequences.blocks.long()
        k = layer.k[index].flatten(1, 2)[:, : self.context].transpose(1, 2).float()
        v = k[..., : layer.v_dim]
        if layer.v is not None:
            v = layer.v[index].flatten(1, 2)[:, : self.context].transpose(1, 2).float()
        q = self.q.float().view(len(self.q), self.shape.kv_heads, -1, k.shape[-1])
        wanted = F.scaled_dot_product_attention(q, k, v, scale=self.rule.scale).flatten(1, 2)
        return float((self.out - wanted).norm() / wanted.norm())

    def bound(self) -> float:
        """us."""
        return (
            len(self.q)
            * self.context
            * sum(self.shape.dims[: 2 - self.shape.latent])
            * (2 * self.shape.kv_heads / RATE * 1e6)
        )


def candidates(latent: bool) -> Iterator[DecodeTile]:
    for n, warps, stages in itertools.product((16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4)):
        if not latent or (n <= 64 and warps >= 4):
            yield DecodeTile(n, warps, stages)


def compiled(job: tuple[Shape, DecodeTile]) -> None:
    """Leaves the kernels in Triton's cache, in a process of its own."""
    case = Case(job[0], 4, 64, 1)
    for splits in (1, 2):
        with contextlib.suppress(Exception):  # said when it is timed
            case.run(job[1], splits, 0)


def swept(case: Case, sets: int) -> None:
    found = []
    for tile, splits in itertools.product(candidates(case.shape.latent), (1, 2, 4, 8)):
        if splits > 1 and case.context // splits < 64:
            continue
        try:
            took = in_graph(lambda which, t=tile, s=splits: case.run(t, s, which), sets)  # type: ignore[misc]
        except Exception as error:
            print("   ", tile, splits, type(error).__name__, str(error)[:60])
            continue
        found.append((took, splits, tile))
    for took, splits, tile in sorted(found, key=lambda one: one[0])[:6]:
        print(f"    {took:8.1f} splits {splits} {tile}", flush=True)


def compare(case: Case, asked: tuple[str, ...]) -> None:
    """One line: each of the kernels, and what the bytes of keys and values take."""
    found = []
    for name in asked:
        try:
            kernels = case.shape.chosen(name, max(case.context, 4096)).kernels
            found.append(f"{name} {case.took(kernels):.1f} us")
        except ConfigError as error:
            found.append(str(error))
    print(
        f"batch {len(case.q)}, context {case.context}: {', '.join(found)}, bound {case.bound():.1f}",
        flush=True,
    )


def main() -> None:
    parser = arguments(__doc__, batch="64,128,256", context="256")
    parser.add_argument("--kernels", default="triton,flashinfer")
    parser.add_argument("--latent", action="store_true", help="16 heads of latent attention, else 32 over 4")
    parser.add_argument("--sweep", action="store_true", help="other tiles of Triton's kernel too")
    given = parser.parse_args()
    shape = Shape(16, 1, True) if given.latent else Shape(32, 4, False)
    if given.sweep:
        with multiprocessing.get_context("spawn").Pool(12) as pool:
            pool.map(compiled, [(shape, tile) for tile in candidates(given.latent)], chunksize=1)
    for context, batch in itertools.product(given.context, given.batch):
        sets = max(2, int(2e9 / (batch * context * sum(shape.dims) * shape.kv_heads * 2)))
        case = Case(shape, batch, context, min(sets, 24))
        compare(case, tuple(given.kernels.split(",")))
        if given.sweep:
            swept(case, case.sets)


if __name__ == "__main__":
    main()
