"""The experts' two grouped GEMMs on one GPU, in a graph, weights rotated past L2, beside torch and the bound.

    python3 benchmarks/gpu_experts.py --experts 128 --rows 512,2048 [--fp8] [--sweep]

"hopper" is the one kernel for Hopper, for each of its numbers of rows of a tile. --fp8: weights are codes
with a scale for 128 x 128, beside torch on the same values in BF16. --sweep times other tiles of the other
kernels. The result is checked against torch first. Rows drawn uniformly. Times in microseconds per layer,
median of replays.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpu_timing import BF16, RATE, arguments, in_graph, numbers

from ep_server.backends.gpu.kernels.hopper.experts import HopperExperts, Tile, hopper_fits
from ep_server.backends.gpu.kernels.triton.expert_rows import (
    GROUP,
    ExpertRows,
    ExpertWeights,
    Tiles,
    tiles_for,
)
from ep_server.backends.gpu.kernels.triton.experts import run_experts
from ep_server.models.loading import widen

SHARED = 227 << 10  # bytes of shared memory


@dataclass(frozen=True)
class Case:
    """Rows of a layer, and the weights of several. plain_weights: in BF16, of the first layer at least."""

    given: ExpertRows
    weights: list[ExpertWeights]
    plain_weights: list[ExpertWeights]
    hidden: torch.Tensor
    out: torch.Tensor

    @staticmethod
    def of(experts: int, rows: int, width: int, ffn: int, sets: int, *, fp8: bool = False) -> Case:
        """rows: in all, drawn uniformly. fp8: weights are, for sizes in whole blocks."""
        drawn = torch.randint(experts, (rows,), device="cuda")
        counts = torch.bincount(drawn, minlength=experts)
        offsets = F.pad(counts.cumsum(0), (1, 0))
        given = ExpertRows(torch.randn(rows, width, device="cuda").to(BF16), counts.int(), offsets)
        shapes = ((experts, 2 * ffn, width), (experts, width, ffn))
        if fp8:
            codes = [[in_codes(shape) for shape in shapes] for _ in range(sets)]
            weights = [ExpertWeights(up[0], down[0], up[1], down[1]) for up, down in codes]
            plain = [ExpertWeights(*(widen(*each, (GROUP, GROUP)).to(BF16) for each in codes[0]))]
        else:
            plain = weights = [
                ExpertWeights(*((torch.randn(s, device="cuda") * s[-1] ** -0.5).to(BF16) for s in shapes))
                for _ in range(sets)
            ]
        hidden = torch.empty(rows, ffn, device="cuda", dtype=BF16)
        return Case(given, weights, plain, hidden, torch.full_like(given.rows, float("nan")))

    def run(self, tiles: tuple[Tiles, Tiles] | None, which: int) -> None:
        """One layer."""
        run_experts(
            self.given, self.weights[which], self.hidden, self.out, tiles=tiles, rows_per_expert=self.each
        )

    def hopper(self) -> None:
        """Prints the times of the kernel for Hopper, each checked."""
        if not all(hopper_fits(each) for each in self.weights):
            return
        layers, plain = [HopperExperts(each) for each in self.weights], self.plain(0)
        scratch = torch.empty(layers[0].scratch_bytes(len(self.out)), device="cuda", dtype=torch.uint8)

        def run(which: int, tile: Tile) -> None:
            layers[which].run(self.given, scratch, self.out, rows_per_expert=self.each, tile=tile)

        for tile in self.tiles():
            self.out.fill_(float("nan"))
            run(0, tile)
            error = ((self.out - plain).norm() / plain.norm()).item()
            assert error < 0.01, error
            took = in_graph(lambda which: run(which, tile), len(layers))  # noqa: B023
            print(
                f"    hopper, {'wide ' if tile.wide else ''}tiles of {tile.rows} rows: {took:.1f} us "
                f"({self.bound() / took:.0%}); error {error:.1e}",
                flush=True,
            )

    def tiles(self) -> list[Tile]:
        """All of the kernel for Hopper that there are for the weights."""
        _, width, ffn = self.weights[0].down.shape
        narrow = [Tile(rows) for rows in (32, 48, 64, 96, 128)]
        if self.weights[0].fp8:
            return narrow[:4]
        wide = [Tile(rows, wide=True) for rows in (96, 128, 160, 192)]
        return narrow + (wide if width % 256 == 0 and ffn % 128 == 0 else [])

    @property
    def each(self) -> int:
        """Rows of an expert, mean."""
        return -(-len(self.given.rows) // len(self.given.counts))

    def plain(self, which: int) -> torch.Tensor:
        """By torch."""
        offsets, weights = self.given.offsets[1:].int(), self.plain_weights[which]
        both = torch._grouped_mm(self.given.rows, weights.gate_up.transpose(1, 2), offsets)
        gate, up = both.chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, weights.down.transpose(1, 2), offsets)

    def bound(self) -> float:
        """us: bytes of the experts that have rows, once."""
        busy = int((self.given.counts > 0).sum())
        each = self.weights[0].gate_up[0].nbytes + self.weights[0].down[0].nbytes
        return busy * each / RATE * 1e6


def in_codes(shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales that are powers of two: BF16 holds the products."""
    experts, n, k = shape
    codes = (torch.randn(shape, device="cuda") * 16).to(torch.float8_e4m3fn)
    powers = torch.randint(-1, 2, (experts, n // GROUP, k // GROUP), device="cuda") - round(
        math.log2(16 * k**0.5)
    )
    return codes, torch.exp2(powers.float())


def candidates(m: int, gated: bool, fp8: bool) -> Iterator[Tiles]:
    """Shapes that fit."""
    parts, weight = 2 if gated else 1, 1 if fp8 else 2  # bytes
    for n, k, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (3, 4, 5)):
        stage = (2 * m + weight * parts * n) * k
        resident = min(SHARED // (stage * stages), 16 // warps * 2, 4)
        if resident and m * n * parts <= 4096 * warps and stage >= 12 << 10:
            yield Tiles(m, n, k, warps, stages, resident)


def compiled(job: tuple[int, int, int, Tiles, bool, bool]) -> None:
    """Leaves a kernel in Triton's cache, in a process of its own."""
    experts, width, ffn, tiles, gated, fp8 = job
    case = Case.of(experts, 4 * experts, width, ffn, 1, fp8=fp8)
    other = tiles_for(4, gated=not gated, dtype=BF16, fp8=fp8)
    with contextlib.suppress(Exception):  # said when it is timed
        case.run((tiles, other) if gated else (other, tiles), 0)


def swept(case: Case, m: int) -> None:
    """Each of the two products with every shape, the other one as the table has it."""
    fp8 = case.weights[0].fp8
    default = tuple(tiles_for(case.each, gated=gated, dtype=BF16, fp8=fp8) for gated in (True, False))
    experts, width, ffn = case.weights[0].down.shape
    jobs = [(experts, width, ffn, t, g, fp8) for g in (True, False) for t in candidates(m, g, fp8)]
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(compiled, jobs, chunksize=1)
    for gated in (True, False):
        found = []
        for tiles in candidates(m, gated, fp8):
            both = (tiles, default[1]) if gated else (default[0], tiles)
            try:
                found.append((in_graph(lambda which: case.run(both, which), len(case.weights)), tiles))  # noqa: B023
            except Exception as error:
                print("   ", tiles, type(error).__name__, str(error)[:60])
        for took, tiles in sorted(found, key=lambda one: one[0])[:6]:
            print(f"    {'gate/up' if gated else 'down':8s} {took:8.1f} {tiles}", flush=True)


def main() -> None:
    parser = arguments(__doc__, rows="512,1024,2048")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=768)
    parser.add_argument("--m", default="16,32", type=numbers, help="rows of the tiles to try")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    weight = 3 if given.fp8 else 6  # bytes, of three matrices
    sets = max(1, (1 << 30) // (given.experts * given.hidden * given.ffn * weight) + 1)
    for rows in given.rows:
        torch.manual_seed(rows)
        case = Case.of(given.experts, rows, given.hidden, given.ffn, sets, fp8=given.fp8)
        case.run(None, 0)
        plain = case.plain(0)
        error = ((case.out - plain).norm() / plain.norm()).item()
        assert error < 0.01, error
        ours = in_graph(lambda which: case.run(None, which), sets)  # noqa: B023
        theirs = in_graph(case.plain, len(case.plain_weights))
        print(
            f"{given.experts} experts, {rows} rows: {ours:.1f} us, grouped_mm {theirs:.1f}, "
            f"bound {case.bound():.1f} ({case.bound() / ours:.0%}); error {error:.1e}",
            flush=True,
        )
        case.hopper()
        if given.sweep:
            for m in given.m:
                swept(case, m)


if __name__ == "__main__":
    main()
