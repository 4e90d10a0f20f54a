"""Products of a decode step's rows on one Hopper GPU, in a graph: ours, the library's, and the bound.

    python3 benchmarks/gpu_products.py [--rows 16,64] [--shapes qkv,out,router]

The projections and the router of Qwen3-30B-A3B. Each product is checked first. "cold" rotates weights past
L2, "hot" has one; "chained" is the product between the kernels that are beside it in a step, which is what
counts: the one that reads it, and but for "out" a norm ahead. Ours by split (tile x splits of channels),
/64 = two or more tiles of 64 rows, + = lets the next kernel start.
Times in microseconds a product, median of replays. The bound: bytes of the weight at 4.5 TB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product as product_of

import torch
import torch.nn.functional as F
from gpu_timing import BF16, RATE, arguments, in_graph

from ep_server.backends.gpu.kernels.hopper.products import HopperProduct, LaunchConfig, SplitK
from ep_server.backends.gpu.kernels.triton.norm import add_rms_norm
from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.backends.gpu.kernels.triton.rope import HeadNorm, Rotation, store_gqa
from ep_server.backends.gpu.kernels.triton.router import Choice, route
from ep_server.models.families.spec import RouterSpec
from ep_server.models.kv_cache import KvLayer

PAST_L2, CALLS = 80 << 20, 20
Product = torch.Tensor | Partial
Reader = Callable[[Product], None]


@dataclass(frozen=True)
class Shape:
    """weight: [N, K]. splits: to try, the default first. wide: the library's product is of float32."""

    name: str
    weight: tuple[int, int]
    splits: tuple[SplitK, ...]
    wide: bool = False


SHAPES = (
    Shape("qkv", (5120, 2048), (SplitK(128, 3),)),
    Shape("out", (2048, 4096), (SplitK(128, 8), SplitK(64, 4), SplitK(128, 6), SplitK(64, 3))),
    Shape(
        "router",
        (128, 2048),
        (SplitK(64, 16), SplitK(128, 32), SplitK(128, 16), SplitK(128, 8), SplitK(64, 8)),
        wide=True,
    ),
)


def qkv_reader(rows: int) -> Reader:
    """Head norms, rotation, the cache."""
    cache = torch.zeros(rows, 16, 4, 128, device="cuda", dtype=BF16)
    kv = PagedKv(KvLayer(cache, cache.clone(), 128))
    q = torch.empty(rows, 32, 128, device="cuda", dtype=BF16)
    at = torch.arange(rows, device="cuda")
    turn = Rotation(torch.rand(4096, 64, 2, device="cuda"), at, at * 16)
    norm = HeadNorm(torch.ones(36, 128, device="cuda", dtype=BF16), 1e-6)
    return lambda product: store_gqa(product, q, kv, turn, norm)


def out_reader(rows: int) -> Reader:
    """The residual stream and its norm."""
    residual, weight = (torch.zeros(*size, device="cuda", dtype=BF16) for size in ((rows, 2048), (2048,)))
    out = torch.empty_like(residual)
    return lambda product: add_rms_norm(product, residual, weight, 1e-6, out)


def router_reader(rows: int) -> Reader:
    """The choice of eight experts."""
    ids = torch.empty(rows, 8, dtype=torch.int64, device="cuda")
    choice = Choice(RouterSpec(128, 8, renormalise=True), ids, torch.empty(rows, 8, device="cuda"))
    return lambda product: route(product, choice)


READERS = {"qkv": qkv_reader, "out": out_reader, "router": router_reader}


class Case:
    """Rows, a shape's weights past L2, and how long each way takes."""

    def __init__(self, shape: Shape, rows: int) -> None:
        torch.manual_seed(rows)
        self.shape, (n, k) = shape, shape.weight
        sets = PAST_L2 // (n * k * 2) + 1
        self.weights = (torch.randn(sets, n, k, device="cuda") * k**-0.5).to(BF16).unbind()
        self.x = torch.randn(rows, k, device="cuda").to(BF16)
        self.read = READERS[shape.name](rows)
        self.residual, self.ones = torch.zeros_like(self.x), torch.ones_like(self.x[0])
        torch.cuda.synchronize()  # a weight is read before the kernel ahead has ended

    def library(self, which: int) -> Product:
        """As steps have it."""
        if self.shape.wide:
            return torch.mm(self.x, self.weights[which].t(), out_dtype=torch.float32)
        return F.linear(self.x, self.weights[which])

    def configs(self) -> Iterator[tuple[str, LaunchConfig]]:
        """Named."""
        tiles = (0, 64)[: 1 + (len(self.x) > 64)]
        for split_k, rows, starts in product_of(self.shape.splits, tiles, (False, True)):
            marks = f"{f'/{rows}' if rows else ''}{'+' * starts}"
            yield f"{split_k.tile}x{split_k.splits}{marks}", LaunchConfig(split_k, rows, starts)

    @property
    def normed(self) -> bool:
        """Whether a norm is ahead of it."""
        return self.shape.name != "out"

    def chained(self, product: Callable[[int], Product], which: int) -> None:
        """With what is beside it in a step. The rows are normed again and again."""
        if self.normed:
            add_rms_norm(self.x, self.residual, self.ones, 1e-6, self.x)
        self.read(product(which))

    def check(self, product: HopperProduct) -> None:
        """Against float64."""
        wanted = self.x.double() @ self.weights[0].double().T
        error = (product(self.x).sums.double().sum(0) - wanted).norm() / wanted.norm()
        assert float(error) < 1e-5, float(error)

    def times(self, product: Callable[[int], Product]) -> str:
        """cold, hot, chained."""
        sets = len(self.weights)
        cold, hot = timed(product, sets), timed(lambda which: product(0), sets)
        chained = timed(partial(self.chained, product), sets)
        return f"{cold:8.2f} {hot:8.2f} {chained:8.2f}"

    def compare(self) -> None:
        """A line for each way."""
        bound = self.weights[0].nbytes / RATE * 1e6
        print(
            f"{self.shape.name} {list(self.shape.weight)}, {len(self.x)} rows, bound {bound:.2f} us:"
            "     cold      hot  chained",
            flush=True,
        )
        print(f"    {'library':12s} {self.times(self.library)}", flush=True)
        for name, config in self.configs():
            all_of = [HopperProduct(weight, config=config) for weight in self.weights]
            self.check(all_of[0])
            print(f"    {name:12s} {self.times(partial(of_one, all_of, self.x))}", flush=True)


def timed(work: Callable[[int], object], sets: int) -> float:
    """us per call, in a graph of CALLS or more, the weights' sets in turn."""
    return in_graph(work, sets, rounds=-(-CALLS // sets))


def of_one(products: list[HopperProduct], x: torch.Tensor, which: int) -> Product:
    return products[which](x)


def main() -> None:
    parser = arguments(__doc__, rows="16,32,64,128,256")
    parser.add_argument("--shapes", default="qkv,out,router")
    given = parser.parse_args()
    with torch.inference_mode():
        for shape in (one for one in SHAPES if one.name in given.shapes.split(",")):
            for rows in given.rows:
                Case(shape, rows).compare()


if __name__ == "__main__":
    main()
