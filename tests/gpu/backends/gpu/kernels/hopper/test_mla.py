"""The latent attention kernel for Hopper against float64 attention of torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep_server.backends.gpu.capability import native
from ep_server.backends.gpu.kernels.hopper.mla import MlaLaunchConfig, mla_launch_config_for
from tests.support.gpu.latent_case import BF16, LATENT, NAN, LatentCase

pytestmark = pytest.mark.gpu
LENGTHS = [1, 0, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256, 300, 1000]
ALONE, PAIR = MlaLaunchConfig(1, 132), MlaLaunchConfig(2, 132)


@pytest.mark.parametrize("part", ["scores", "values"])
@pytest.mark.parametrize("config", [ALONE, PAIR], ids=str)
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_one_tile(heads: int, config: MlaLaunchConfig, part: str) -> None:
    """Either product alone. Scores: one position is all that is attended to, by head and by channel of the
    query. Values: all positions alike, and each channel of each position has its own share of the mean.
    """
    config = replace(config, team=1) if heads > 32 else config
    case = LatentCase.of([64], heads)
    keys, wanted = case.latents[0], torch.empty(1, heads, LATENT, device="cuda", dtype=BF16)
    if part == "scores":
        keys.zero_()
        keys[:, :64] = 60 * torch.eye(64, device="cuda")
        keys[:, 64:LATENT] = torch.randn(64, LATENT - 64, device="cuda").to(BF16)
        keys[:, 512:] = 60 * torch.eye(64, device="cuda").flip(0)
        case.q.zero_()
        for head in range(heads):
            at = head * 37 % 64
            case.q[0, head, at] = case.q[0, head, 512 + 63 - at] = 60
            wanted[0, head] = keys[at, :LATENT]
    else:
        case.q.zero_()
        wanted[0] = keys[:, :LATENT].double().mean(0).to(BF16)
    blocks = case.step.blocks[0, :4].long()
    case.kv.layer.k[blocks] = keys.view(4, 16, 1, -1)
    torch.testing.assert_close(case.run(config), wanted, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("config", [ALONE, PAIR, *(MlaLaunchConfig(n, 132) for n in (4, 8, 16))], ids=str)
@pytest.mark.parametrize("heads", [16, 32])
def test_every_length(heads: int, config: MlaLaunchConfig) -> None:
    case = LatentCase.of(LENGTHS, heads)
    case.check(case.run(config))


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("heads", [48, 64, 80, 128])
def test_more_heads_than_a_warpgroup_has(heads: int, splits: int) -> None:
    case = LatentCase.of(LENGTHS, heads)
    case.check(case.run(replace(ALONE, splits=splits)))


@pytest.mark.parametrize("splits", [2, 3, 16])
@pytest.mark.parametrize("team", [2, 4, 16])
def test_parts_of_teams(team: int, splits: int) -> None:
    case = LatentCase.of([*LENGTHS, 3000])
    case.check(case.run(MlaLaunchConfig(team, 132, splits)))


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(("heads", "config"), [(16, ALONE), (16, PAIR), (32, PAIR), (128, ALONE)], ids=str)
def test_blocks(heads: int, config: MlaLaunchConfig, block: int) -> None:
    case = LatentCase.of(LENGTHS, heads, block)
    case.check(case.run(config))


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("blocks", [1, 3, 11])
def test_blocks_with_many_items(heads: int, blocks: int) -> None:
    """Some of them empty, some of more tiles than are looked up at once."""
    case = LatentCase.of([37 * n % 700 for n in range(48)], heads)
    case.check(case.run(MlaLaunchConfig(1, blocks)))


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 64, 128, 140, 256, 300])
@pytest.mark.parametrize("heads", [16, 128])
def test_batches_as_a_rank_runs_them(heads: int, rows: int) -> None:
    case = LatentCase.of([130 + 7 * (n % 31) for n in range(rows)], heads)
    case.check(case.run(mla_launch_config_for(rows, heads, 132, 4096)))


@pytest.mark.parametrize("heads", [16, 128])
def test_long_contexts(heads: int) -> None:
    case = LatentCase.of([9000, 5, 4097], heads)
    case.check(case.run(mla_launch_config_for(3, heads, 132, 16384)))


@pytest.mark.parametrize(("heads", "config"), [(16, PAIR), (128, ALONE)], ids=str)
def test_a_cache_of_more_than_4_gib(heads: int, config: MlaLaunchConfig) -> None:
    """Half of its blocks lie further than 32 bits count bytes."""
    case = LatentCase.of([300, 1000, 65], heads, spare=1 << 19)
    assert case.kv.layer.k.nbytes > 2 << 32
    case.check(case.run(config))


@pytest.mark.parametrize("config", [ALONE, PAIR, MlaLaunchConfig(16, 132, 4)], ids=str)
def test_padding_alone(config: MlaLaunchConfig) -> None:
    case = LatentCase.of([0, 0, 0])
    case.check(case.run(config))


@pytest.mark.parametrize("config", [ALONE, PAIR], ids=str)
def test_large_scores_do_not_overflow(config: MlaLaunchConfig) -> None:
    case = LatentCase.of([100, 300])
    case.q *= 300.0
    assert case.run(config).isfinite().all()


@pytest.mark.parametrize(
    ("heads", "config"),
    [(16, ALONE), (16, MlaLaunchConfig(8, 132)), (16, MlaLaunchConfig(16, 132, 2)), (128, ALONE)],
    ids=str,
)
def test_replays_behind_a_slow_kernel_are_the_same_bit_for_bit(heads: int, config: MlaLaunchConfig) -> None:
    """It reads early what the step was given alone; a graph of it and what makes its input is replayed."""
    case = LatentCase.of([40, 257, 1000, 130], heads)
    wanted, made = case.run(config), torch.zeros_like(case.q)
    case.check(wanted)
    (step, out), kernel = case.given(config), case.kernel()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(1_000_000)
        made.copy_(case.q)
        kernel.run(made, step, out)
    for _ in range(3):
        made.fill_(NAN)
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("heads", 0, "1 to 128"),
        ("heads", 144, "1 to 128"),
        ("block_size", 8, "a power of two from 16"),
        ("block_size", 48, "a power of two from 16"),
        ("positions", 40, "whole blocks, below 2^31 positions"),
    ],
)
def test_sizes_that_it_does_not_take_are_refused(field: str, value: int, allowed: str) -> None:
    cache = torch.zeros(64, 576, device="cuda", dtype=BF16)
    sizes = {"positions": 64, "heads": 16, "block_size": 16} | {field: value}
    with pytest.raises(ValueError, match=rf"^{field}: {value}, must be {allowed.replace('^', '.')}$"):
        native().Mla(device=0, cache=cache.data_ptr(), scale=1.0, **sizes)


@pytest.mark.parametrize(
    ("heads", "config", "message"),
    [
        (16, MlaLaunchConfig(3, 132), "team: 3, must be a power of two up to 16"),
        (16, MlaLaunchConfig(32, 132), "team: 32, must be a power of two up to 16"),
        (64, MlaLaunchConfig(2, 132), "team: 2, must be a power of two up to 1"),
        (16, MlaLaunchConfig(1, 0), "blocks: 0, must be at least 1"),
        (16, MlaLaunchConfig(1, 132, 2), "splits: 2, must be 1 to 1 with a team of 1"),
    ],
)
def test_so_are_launches(heads: int, config: MlaLaunchConfig, message: str) -> None:
    """And what follows is served."""
    case = LatentCase.of([20], heads)
    with pytest.raises(ValueError, match=f"^{message}$"):
        case.run(config)
    case.check(case.run(ALONE))
