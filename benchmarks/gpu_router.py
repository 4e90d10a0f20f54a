"""The router on one GPU, in a graph, weights rotated past L2: one kernel beside product and choice.

    PYTHONPATH=. python3 benchmarks/gpu_router.py --experts 128 --rows 16,64,256,512 [--sweep]

--sweep times other tiles and numbers of parts. The result is checked against torch first. Times in
microseconds per layer, median of replays.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu_experts import in_graph
from ep_server.model.families.spec import RouterSpec
from ep_server.model.triton.router import route
from ep_server.model.triton.router_choice import Choice
from ep_server.model.triton.router_rows import RouterSpace, RouterTile, parts_for, route_rows, tile_for

BF16, L2 = torch.bfloat16, 64 << 20


@dataclass(frozen=True)
class Cut:
    """How the product is cut. tokens, parts: of the space."""

    tokens: int
    parts: int
    tile: RouterTile


@dataclass(frozen=True)
class Case:
    """Rows of a layer, and the weights of several."""

    x: torch.Tensor
    weights: list[torch.Tensor]
    choice: Choice

    @staticmethod
    def of(spec: RouterSpec, rows: int, width: int, sets: int) -> Case:
        ids = torch.empty(rows, spec.top_k, dtype=torch.int64, device="cuda")
        gates = torch.empty(rows, spec.top_k, device="cuda")
        live = torch.full((1,), rows, dtype=torch.int32, device="cuda")
        return Case(
            torch.randn(rows, width, device="cuda").to(BF16),
            [
                (torch.randn(spec.num_experts, width, device="cuda") * width**-0.5).to(BF16)
                for _ in range(sets)
            ],
            Choice(spec, ids, gates, None, live),
        )

    def space(self, cut: Cut) -> RouterSpace:
        return RouterSpace.of(len(self.x), self.weights[0], tokens=cut.tokens, parts=cut.parts)

    def fused(self, cut: Cut, space: RouterSpace, which: int) -> None:
        """One kernel."""
        route_rows(self.x, self.weights[which], self.choice, space, cut.tile)

    def plain(self, which: int) -> None:
        """Two kernels."""
        logits = torch.mm(self.x, self.weights[which].t(), out_dtype=torch.float32)
        route(logits, self.choice)

    def check(self, cut: Cut) -> None:
        """Raises AssertionError unless the chosen have the highest scores, and these as weights."""
        space = self.space(cut)
        self.choice.ids.fill_(-1)
        for _ in range(2):
            self.fused(cut, space, 0)
        spec = self.choice.spec
        scores = (self.x.double() @ self.weights[0].double().t()).softmax(-1)
        found = scores.gather(1, self.choice.ids)
        torch.testing.assert_close(found, scores.topk(spec.top_k).values, rtol=1e-4, atol=0)
        wanted = found / found.sum(-1, keepdim=True)
        torch.testing.assert_close(self.choice.weights.double(), wanted, rtol=1e-4, atol=0)

    def time(self, cut: Cut) -> float:
        space = self.space(cut)
        return in_graph(lambda which: self.fused(cut, space, which), len(self.weights))


def default(experts: int, width: int) -> Cut:
    return Cut(16, parts_for(width), tile_for(max(16, 1 << (experts - 1).bit_length()), BF16))


def candidates(experts: int, width: int) -> Iterator[Cut]:
    """Cuts whose stages fit shared memory twice."""
    for tokens, parts, channels, warps in itertools.product((16, 32), (4, 8, 16, 32), (32, 64, 128), (4, 8)):
        steps = -(-width // (parts * channels))
        stage = (experts + tokens) * channels * 2
        for stages in sorted({min(steps + 1, most) for most in (2, 3, 5)}):
            if parts * channels <= width and stage * stages <= 100 << 10:
                yield Cut(tokens, parts, RouterTile(channels, warps, stages))


def compiled(job: tuple[RouterSpec, int, Cut]) -> None:
    """Leaves a kernel in Triton's cache, in a process of its own."""
    spec, width, cut = job
    case = Case.of(spec, 16, width, 1)
    with contextlib.suppress(Exception):  # said when it is timed
        case.fused(cut, case.space(cut), 0)


def swept(case: Case, width: int) -> None:
    """The fastest cuts; each is checked."""
    spec = case.choice.spec
    cuts = list(candidates(spec.num_experts, width))
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(compiled, [(spec, width, cut) for cut in cuts], chunksize=1)
    found = []
    for cut in cuts:
        try:
            case.check(cut)
            found.append((case.time(cut), cut))
        except Exception as error:
            print("   ", cut, type(error).__name__, str(error)[:60])
    for took, cut in sorted(found, key=lambda one: one[0])[:8]:
        print(f"    {took:6.2f} {cut}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rows", default="16,64,128,256,512,1024")
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    spec = RouterSpec(given.experts, given.top_k, renormalise=True)
    sets = L2 // (given.experts * given.hidden * 2) + 1
    cut = default(given.experts, given.hidden)
    print(torch.cuda.get_device_name(), torch.__version__, cut)
    for rows in (int(one) for one in given.rows.split(",")):
        torch.manual_seed(rows)
        case = Case.of(spec, rows, given.hidden, sets)
        case.check(cut)
        print(
            f"{given.experts} experts, {rows} rows: one kernel {case.time(cut):.2f} us, "
            f"two {in_graph(case.plain, sets):.2f}",
            flush=True,
        )
        if given.sweep:
            swept(case, given.hidden)


if __name__ == "__main__":
    main()
