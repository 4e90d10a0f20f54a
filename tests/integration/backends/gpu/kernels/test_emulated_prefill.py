"""The Hopper kernel for attention of chunks on the CPU: which block does what, joins, masks, all addresses.

The emulation: tests/support/gpu/emulated_hopper. The same cases run on GPUs, with more of them.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_server.backends.gpu.kernels.hopper import prefill
from tests.support.gpu import emulated_hopper, latent_prefill_case
from tests.support.gpu.prefill_case import Chunks, check
from tests.support.triton.harness import INTERPRETED

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="its fibers are switched by x86-64 code"),
    pytest.mark.skipif(not INTERPRETED, reason="tensors are on a GPU"),
]
MIXED: Chunks = [(30, 0), (1, 1), (77, 77), (0, 0), (129, 1), (300, 20)]


class OnCpu:
    """The kernel for tensors of the CPU."""

    def __init__(self, **given: Any) -> None:
        self._kernel = emulated_hopper.module().Prefill(**given | {"device": 0})
        self.run = self._kernel.run

    @staticmethod
    def scratch_bytes(device: int | None) -> int:
        return int(emulated_hopper.module().Prefill.scratch_bytes(device=0))


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prefill, "native", lambda: SimpleNamespace(Prefill=OnCpu))
    monkeypatch.setattr(prefill, "runs_hopper_kernels", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    yield
    emulated_hopper.module().multiprocessors(2)
    emulated_hopper.module().late_blocks(0)


def multiprocessors(count: int) -> None:
    """Of the GPU from now on: blocks of a launch are at most as many."""
    emulated_hopper.module().multiprocessors(count)


@pytest.mark.parametrize("heads", [(4, 2), (10, 2), (5, 1)], ids=str)
def test_chunks_of_a_step(heads: tuple[int, int]) -> None:
    multiprocessors(5)
    check(MIXED, heads)


@pytest.mark.parametrize("block", [8, 64, 256])
def test_blocks_of_each_size(block: int) -> None:
    check([(130, 20), (257, 1)], (4, 1), block)


@pytest.mark.parametrize("end", [127, 128, 129, 385])
def test_ends_of_tiles_and_of_the_ring(end: int) -> None:
    check([(end, 9), (end + 128, 3)], (2, 1))


def test_whole_contexts() -> None:
    """One multiprocessor, whose block takes all tiles of rows."""
    multiprocessors(1)
    check([(200, 70), (60, 60)], (8, 1))


@pytest.mark.parametrize("count", [3, 16])
def test_parts_of_a_long_context(count: int) -> None:
    """At most four parts, or more, which are joined in another way."""
    multiprocessors(count)
    check([(1500, 5), (40, 3)], (2, 2))


def test_blocks_that_take_a_part_and_then_others() -> None:
    """Ten parts for four blocks: one of them begins with the second part of a context."""
    multiprocessors(4)
    check([(1500, 5)], (5, 5))


def test_blocks_that_begin_late() -> None:
    """Others have taken most of the work by then, and wait for the parts that are left."""
    multiprocessors(4)
    emulated_hopper.module().late_blocks(20_000)
    check([(900, 20), (300, 40)], (2, 2))


def test_padding_alone() -> None:
    check([(0, 0), (0, 0)], (4, 2))


@pytest.mark.parametrize("count", [1, 6])
def test_latent_chunks(count: int) -> None:
    multiprocessors(count)
    latent_prefill_case.check([(200, 40), (0, 0), (300, 3)], 2)
