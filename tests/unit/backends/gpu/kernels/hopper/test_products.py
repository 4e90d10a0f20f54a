"""Which rows and weights the products' kernel for Hopper is for; what it computes needs one (tests/gpu)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_server.backends.gpu import capability
from ep_server.backends.gpu.attention.attention import GqaKernels
from ep_server.backends.gpu.kernels.hopper import products as hopper_products
from ep_server.backends.gpu.kernels.hopper.products import (
    MOST_ROWS,
    HopperProduct,
    LaunchConfig,
    Limits,
    SplitK,
    hopper_fits,
    hopper_product,
    product,
    rows_of_tile,
    split_k_for,
)
from ep_server.backends.gpu.kernels.triton.partial import Partial
from ep_server.backends.torch_compute import TorchLinear
from ep_server.errors import InternalError
from ep_server.models.layers import GqaWeights

BF16, H200 = torch.bfloat16, 132


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a kernel is told, in place of one."""
    runs: list[dict[str, Any]] = []

    def linear(**of: int) -> SimpleNamespace:
        return SimpleNamespace(run=lambda **given: runs.append(of | given))

    monkeypatch.setattr(capability, "import_module", lambda _: SimpleNamespace(Linear=linear))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    return runs


def weight_of(n: int = 128, k: int = 256) -> torch.Tensor:
    return torch.zeros(n, k, dtype=BF16)


def rows_of(count: int, k: int = 256) -> torch.Tensor:
    return torch.zeros(count, k, dtype=BF16)


@pytest.mark.parametrize(
    ("size", "split_k"),
    [
        ((5120, 2048), SplitK(128, 3)),
        ((2048, 4096), SplitK(128, 8)),
        ((128, 2048), SplitK(64, 16)),
        ((64, 64), SplitK(64, 1)),
        ((192, 128), SplitK(64, 2)),
        ((5120, 16384), None),  # more weights than blocks hold
        ((151936, 2048), None),
        ((96, 2048), None),
        ((128, 96), None),
        ((128, 0), None),
    ],
)
def test_all_blocks_run_at_once_and_hold_their_weights(size: tuple[int, int], split_k: SplitK | None) -> None:
    assert split_k_for(*size, H200) == split_k


def test_a_tile_holds_all_rows_where_it_can() -> None:
    assert [rows_of_tile(rows, 1) for rows in (1, 32, 33, 64, 65, 128, 129, MOST_ROWS)] == [
        32, 32, 64, 64, 128, 128, 128, 128,
    ]  # fmt: skip


def test_blocks_that_may_share_rows_have_few_each() -> None:
    assert [rows_of_tile(rows, 4) for rows in (1, 128, 129, MOST_ROWS)] == [32, 32, 64, 64]


def test_a_kernel_is_told_where_things_lie(told: list[dict[str, Any]]) -> None:
    weight, x = weight_of(), torch.zeros(5, 264, dtype=BF16)[:, :256]
    sums = HopperProduct(weight, config=LaunchConfig(SplitK(64, 3), lets_next_start=True))(x).sums
    assert sums.shape == (3, 5, 128) and sums.dtype is torch.float32
    assert told == [
        {
            "device": None, "weight": weight.data_ptr(), "n": 128, "k": 256, "tile": 64, "splits": 3,
            "stream": 0, "rows": x.data_ptr(), "pitch": 528, "count": 5, "sums": sums.data_ptr(),
            "rows_of_tile": 32, "lets_next_start": True,
        }
    ]  # fmt: skip


def test_one_row_has_no_pitch(told: list[dict[str, Any]]) -> None:
    x = torch.zeros(256, 1, dtype=BF16).T.as_strided((1, 256), (3, 1))
    hopper = HopperProduct(weight_of(), config=LaunchConfig(SplitK(64, 1)))
    assert hopper.takes(x)
    hopper(x)
    assert told[0]["pitch"] == 512


def test_rows_that_are_for_the_library(told: list[dict[str, Any]]) -> None:
    hopper = HopperProduct(weight_of(), 64, LaunchConfig(SplitK(64, 1)))
    assert hopper.takes(rows_of(1)) and hopper.takes(rows_of(64))
    assert not hopper.takes(rows_of(65)) and not hopper.takes(rows_of(0))
    assert not hopper.takes(rows_of(4).float())
    assert not hopper.takes(rows_of(4, 257)[:, :256]) and not hopper.takes(rows_of(4, 512)[:, ::2])
    assert not hopper.takes(rows_of(4, 264)[:, 1:257])


def test_the_library_takes_what_no_kernel_takes(told: list[dict[str, Any]]) -> None:
    hopper, found = HopperProduct(weight_of(), 64, LaunchConfig(SplitK(64, 1))), torch.ones(1)
    assert isinstance(product(rows_of(64), hopper, lambda x: found), Partial)
    assert product(rows_of(65), hopper, lambda x: found) is found
    assert product(rows_of(64), None, lambda x: found) is found


def test_wrong_shape_is_refused_by_name_before_launch(told: list[dict[str, Any]]) -> None:
    with pytest.raises(InternalError, match=r"^weight: "):
        HopperProduct(weight_of().float())
    with pytest.raises(InternalError, match="weight: no split fits 96 x 256"):
        HopperProduct(weight_of(96))
    with pytest.raises(InternalError, match="most_rows = 257"):
        HopperProduct(weight_of(), 257)
    with pytest.raises(InternalError, match="splits = 33"):
        HopperProduct(weight_of(), config=LaunchConfig(SplitK(64, 33)))
    hopper = HopperProduct(weight_of(), config=LaunchConfig(SplitK(64, 2)))
    with pytest.raises(InternalError, match=r"^x: "):
        hopper(rows_of(4, 128))
    with pytest.raises(InternalError, match=r"^sums: "):
        hopper.run(rows_of(4), torch.zeros(3, 4, 128))
    assert not told


def test_no_kernel_without_a_gpu() -> None:
    assert not hopper_fits(weight_of()) and hopper_product(weight_of(), MOST_ROWS) is None


def test_only_what_a_kernel_can_read_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bias, no weight whose limit is 0, no q and k that are normed over all heads."""
    asked: list[int] = []
    monkeypatch.setattr(hopper_products, "hopper_fits", lambda weight: True)
    monkeypatch.setattr(hopper_products, "HopperProduct", lambda weight, most: asked.append(most))
    linear, limits = TorchLinear(weight_of(), None), Limits(qkv=64, out=32)
    GqaKernels.of(GqaWeights(linear, linear), limits, None)
    assert asked == [64, 32]
    GqaKernels.of(GqaWeights(linear, linear, q_norm=torch.ones(1), k_norm=torch.ones(1)), limits, None)
    assert asked == [64, 32, 32]
    GqaKernels.of(GqaWeights(linear, linear), Limits(), None)
    GqaKernels.of(GqaWeights(TorchLinear(weight_of(), torch.ones(128)), linear), Limits(qkv=64), None)
    assert asked == [64, 32, 32]
