"""The attention kernel for Hopper against float64 attention of torch: norm, rotation, cache and softmax."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep_server.backends.gpu.kernels.hopper.attention import (
    HopperAttentionStep,
    LaunchConfig,
    launch_config_for,
)
from ep_server.backends.gpu.kernels.triton.partial import Partial
from tests.support.gpu.attention_case import BF16, NAN, Case

pytestmark = pytest.mark.gpu
HEADS = [(32, 4), (32, 8), (16, 16), (8, 1), (6, 2), (5, 1)]
CONFIGS = [
    LaunchConfig(8, 132),
    LaunchConfig(4, 132),
    LaunchConfig(2, 132),
    LaunchConfig(1, 132),
    LaunchConfig(1, 7),
    LaunchConfig(8, 1),
    LaunchConfig(2, 2),
]
PLAIN = LaunchConfig(2, 132)
WHOLE = 1 << 20  # positions: no context is cut
LENGTHS = [1, 0, 16, 17, 15, 33, 64, 130, 255, 256, 300, 1000]
# Ends of a tile, of a tile for each warp, of the rings.
ENDS = [end + by for end in (16, 32, 48, 96, 112, 128, 144, 192, 272, 384) for by in (-1, 0, 1)]


@pytest.mark.parametrize("least", [WHOLE, 96, 16])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_length(heads: tuple[int, int], config: LaunchConfig, least: int) -> None:
    case = Case.of(LENGTHS, heads)
    case.check(case.run(replace(config, least=least)))


@pytest.mark.parametrize("least", [WHOLE, 192, 16])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_ends_of_tiles_and_of_the_ring(config: LaunchConfig, least: int) -> None:
    case = Case.of(ENDS)
    case.check(case.run(replace(config, least=least)))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_padding_alone(config: LaunchConfig) -> None:
    case = Case.of([0, 0, 0])
    case.check(case.run(config))


@pytest.mark.parametrize(
    "config",
    [LaunchConfig(8, 3), LaunchConfig(4, 5, 16), LaunchConfig(2, 11, 16), LaunchConfig(1, 1)],
    ids=str,
)
def test_blocks_with_many_items(config: LaunchConfig) -> None:
    """Over 32 a team, some of them empty, some of over 32 tiles a warp: so many are looked up at once."""
    case = Case.of([37 * n % 700 for n in range(48)], (32, 8))
    case.check(case.run(config))


@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("norm", [True, False])
def test_blocks_and_norms(block: int, norm: bool) -> None:
    case = Case.of(LENGTHS, block=block, norm=norm)
    case.check(case.run(PLAIN))


@pytest.mark.parametrize("parts", [1, 3])
def test_partial_sums(parts: int) -> None:
    """Bit for bit what the rounded product gives."""
    case = Case.of(LENGTHS)
    sums = torch.randn(parts, *case.qkv.shape, device="cuda")
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    case.qkv = total.to(BF16)
    torch.cuda.synchronize()
    got = case.run(PLAIN, Partial(sums))
    case.check(got)
    assert torch.equal(got, case.run(PLAIN))


@pytest.mark.parametrize("rows", [1, 8, 32, 33, 64, 128, 200])
def test_batches_as_a_rank_runs_them(rows: int) -> None:
    lengths = [130 + 7 * (n % 31) for n in range(rows)]
    case = Case.of(lengths)
    case.check(case.run(launch_config_for(rows, 4, 132)))


@pytest.mark.parametrize("team", [1, 2, 4, 8])  # with 1, the only sequence has over 32 shares
@pytest.mark.parametrize(
    "lengths", [[20000], [9000, 5, 4097], [40] * 70 + [20000] + [300] * 70], ids=["alone", "few", "one"]
)
def test_long_contexts(lengths: list[int], team: int) -> None:
    case = Case.of(lengths)
    for least in (WHOLE, 256, 16):
        case.check(case.run(LaunchConfig(team, 132, least)))


def test_results_do_not_depend_on_which_share_is_last() -> None:
    """Layers share what counts finished shares, so it must be zero again each time."""
    case = Case.of([40, 20000])
    config = LaunchConfig(8, 132, 16)
    wanted = case.run(config)
    case.check(wanted)
    step, kernel = HopperAttentionStep(case.step, case.spec, config), case.kernel()
    assert int(step.shares.at[: int(step.shares.counts[0])][:, 6].max()) > 20
    for _ in range(50):
        out = torch.full_like(wanted, NAN)
        kernel.run(case.qkv, step, out)
        assert torch.equal(out, wanted)
    assert not step.shares.counts[1:].any()


def test_large_scores_do_not_overflow() -> None:
    case = Case.of([100, 300], norm=False)
    case.qkv *= 300.0
    torch.cuda.synchronize()
    assert case.run(PLAIN).isfinite().all()


def test_behind_a_slow_kernel_it_waits_for_the_projections() -> None:
    """It reads early what the step was given alone; a graph of it and what makes its input is replayed."""
    case = Case.of([40, 257, 130])
    wanted, made = case.run(PLAIN), torch.zeros_like(case.qkv)
    step, out = HopperAttentionStep(case.step, case.spec, PLAIN), torch.empty_like(wanted)
    kernel = case.kernel()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(1_000_000)
        made.copy_(case.qkv)
        kernel.run(made, step, out)
    for _ in range(3):
        made.fill_(NAN)
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, wanted)
