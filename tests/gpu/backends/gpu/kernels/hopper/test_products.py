"""The products' kernel for Hopper against float64 products of torch, and the kernels that add its sums up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from ep_server.backends.gpu.kernels.hopper.products import (
    MOST_ROWS,
    HopperProduct,
    LaunchConfig,
    SplitK,
    hopper_fits,
)
from ep_server.backends.gpu.kernels.triton.norm import add_rms_norm

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
ROWS = [1, 3, 16, 31, 64, 65, 128, 200, 256]
# Weights [N, K]: the projections and the router of Qwen3-30B-A3B, and small ones; also splits with a rest.
CASES = [
    ((5120, 2048), SplitK(128, 3)),
    ((2048, 4096), SplitK(128, 8)),
    ((2048, 4096), SplitK(64, 4)),
    ((128, 2048), SplitK(128, 32)),
    ((128, 2048), SplitK(64, 11)),
    ((192, 320), SplitK(64, 2)),
    ((64, 64), SplitK(64, 1)),
    ((128, 768), SplitK(128, 1)),
]


@dataclass(frozen=True)
class Case:
    """A weight, rows for it that lie in wider ones of NaN, and their product."""

    weight: torch.Tensor
    x: torch.Tensor

    @staticmethod
    def of(size: tuple[int, int], rows: int, pitch: int = 24) -> Case:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("the kernel is for Hopper")
        torch.manual_seed(rows)
        n, k = size
        weight = (torch.randn(n, k, device="cuda") * k**-0.5).to(BF16)
        wide = torch.full((rows, k + pitch), float("nan"), device="cuda", dtype=BF16)
        wide[:, :k] = torch.randn(rows, k, device="cuda")
        torch.cuda.synchronize()  # a weight is read before the kernel ahead has ended
        return Case(weight, wide[:, :k])

    def expected(self) -> torch.Tensor:
        return self.x.double() @ self.weight.double().T

    def check(self, sums: torch.Tensor) -> None:
        """Sums of float32: far nearer than a rounding to bfloat16."""
        torch.testing.assert_close(sums.double().sum(0), self.expected(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("size", "split_k"), CASES, ids=str)
def test_products(size: tuple[int, int], split_k: SplitK, rows: int) -> None:
    case = Case.of(size, rows)
    product = HopperProduct(case.weight, config=LaunchConfig(split_k))
    assert hopper_fits(case.weight) and product.takes(case.x)
    sums = product(case.x).sums
    assert sums.shape == (split_k.splits, rows, size[0])
    case.check(sums)


def test_every_share_of_the_channels_is_its_own() -> None:
    """Part by part: 32 chunks in three runs of 10, 11 and 11."""
    case = Case.of((128, 2048), 5)
    sums = HopperProduct(case.weight, config=LaunchConfig(SplitK(128, 3)))(case.x).sums
    ends = [32 * split // 3 * 64 for split in range(4)]
    for part, (a, b) in zip(sums, pairwise(ends), strict=True):
        expected = case.x[:, a:b].double() @ case.weight[:, a:b].double().T
        torch.testing.assert_close(part.double(), expected, rtol=1e-5, atol=2e-5)


def test_rows_do_not_change_the_bits_of_others() -> None:
    """However many come with one, and in whatever tile: its sums are the same."""
    case = Case.of((5120, 2048), 256)
    product = HopperProduct(case.weight)
    alone = [product(case.x[:rows]).sums for rows in (1, 32, 64, 100, 256)]
    assert all(torch.equal(alone[0][:, 0], sums[:, 0]) for sums in alone)
    assert torch.equal(alone[2], alone[4][:, :64])
    for tile in (32, 64):  # several, one after the other
        again = HopperProduct(case.weight, config=LaunchConfig(rows_of_tile=tile))
        assert torch.equal(again(case.x).sums, alone[4])


@pytest.mark.parametrize("rows", [129, 200, 256])
def test_blocks_share_tiles_of_rows(rows: int) -> None:
    """32 blocks would leave 100 multiprocessors without one: four share 5 to 8 tiles, 2 or 1 each."""
    case = Case.of((2048, 512), rows)
    product = HopperProduct(case.weight, config=LaunchConfig(SplitK(64, 1), 32))
    sums = product(case.x).sums
    case.check(sums)
    assert torch.equal(sums, HopperProduct(case.weight, config=LaunchConfig(SplitK(64, 1), 128))(case.x).sums)


@pytest.mark.parametrize("lets_next_start", [False, True])
@pytest.mark.parametrize("rows", [7, 64, 130])
def test_a_chain_of_kernels_in_a_graph(rows: int, lets_next_start: bool) -> None:
    """Each reads what the one before it wrote: product, norm, product, norm, with new rows at each replay."""
    case = Case.of((1024, 1024), rows, pitch=0)
    product = HopperProduct(case.weight, config=LaunchConfig(lets_next_start=lets_next_start))
    ones, x = torch.ones(1024, device="cuda", dtype=BF16), case.x.clone()
    residual, out = torch.zeros_like(x), torch.empty_like(x)

    def work() -> None:
        torch.mul(x, 0, out=residual)
        torch.mul(x, 1, out=out)
        for _ in range(6):
            add_rms_norm(product(out), residual, ones, 1e-6, out)

    work()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    for seed in range(20):
        torch.manual_seed(seed)
        x.normal_()
        stream, y = torch.zeros_like(x), x.clone()
        for _ in range(6):
            stream += (y.double() @ case.weight.double().T).to(BF16)
            wide = stream.double()
            y = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(BF16)
        graph.replay()
        torch.cuda.synchronize()
        error = (out.double() - y.double()).norm() / y.double().norm()
        assert float(error) < 0.02, seed


@pytest.mark.parametrize("rows", [3, 33, 129])
def test_nothing_is_written_past_the_sums(rows: int) -> None:
    """A tile has more rows than there are."""
    case = Case.of((128, 256), rows)
    room = torch.full((5, rows, 128), float("nan"), device="cuda")
    HopperProduct(case.weight, config=LaunchConfig(SplitK(64, 4))).run(case.x, room[:4])
    case.check(room[:4])
    assert bool(room[4].isnan().all())


def test_rows_that_are_for_the_library() -> None:
    case = Case.of((128, 256), 4)
    product = HopperProduct(case.weight, 64)
    wide = torch.zeros(65, 257, device="cuda", dtype=BF16)
    assert product.takes(wide[:64, :256].contiguous())
    assert not product.takes(wide[:64, :256]) and not product.takes(wide[:, :256].contiguous())
    assert not product.takes(torch.zeros(4, 256, device="cuda")) and not product.takes(case.x[:0])
    assert not product.takes(case.x.T.contiguous().T)
    assert MOST_ROWS == 256


def test_weights_that_have_no_kernel() -> None:
    def weight(n: int, k: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(n, k, device="cuda", dtype=dtype)

    if torch.cuda.get_device_capability()[0] == 9:
        assert hopper_fits(weight(128, 256))
    assert not hopper_fits(weight(96, 256)) and not hopper_fits(weight(128, 96))
    assert not hopper_fits(weight(128, 256, torch.float32)) and not hopper_fits(weight(128, 257)[:, 1:])
    assert not hopper_fits(weight(151936, 2048))
