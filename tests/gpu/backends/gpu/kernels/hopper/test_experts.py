"""The experts' kernel for Hopper against float32 sums of torch, for every way that rows can be spread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ep_server.backends.gpu.kernels.hopper.experts import MOST_PER_EXPERT, Tile, hopper_fits
from ep_server.backends.gpu.kernels.triton.expert_rows import ExpertWeights
from ep_server.backends.gpu.kernels.triton.norm import rms_norm
from tests.support.gpu.experts_case import BF16, FP8, SPARE, Layer, check, hopper

pytestmark = pytest.mark.gpu
SIZES = [(5, 256, 128), (7, 640, 384), (128, 2048, 768), (300, 512, 256), (2, 4096, 14336)]
OF_CODES = [Tile(rows) for rows in (32, 48, 64, 96)]
NARROW, WIDE = [*OF_CODES, Tile(128)], [Tile(rows, wide=True) for rows in (96, 128, 160, 192)]
BOTH = pytest.mark.parametrize("codes", [False, True], ids=["bfloat16", "codes"])
SPREADS = {
    "none": lambda e: [0] * e,
    "one": lambda e: [0] * (e - 1) + [1],
    "few": lambda e: [n % 4 for n in range(e)],
    "tiles": lambda e: [(15, 16, 17, 31, 32, 33, 63, 64, 65, 0)[n % 10] for n in range(e)],
    "all to one": lambda e: [0] * (e // 2) + [200] + [0] * (e - e // 2 - 1),
    "many": lambda e: [(127, 1, 300, 160, 0, 161, 97)[n] if n < 7 else 0 for n in range(e)],
    "more": lambda e: [(192, 191, 193, 384, 500)[n] if n < 5 else 0 for n in range(e)],
}


def tiles(size: tuple[int, int, int], codes: bool) -> list[Tile]:
    """All that there are."""
    _, width, ffn = size
    return OF_CODES if codes else NARROW + WIDE if width % 256 == 0 and ffn % 128 == 0 else NARROW


CASES = [(size, codes, tile) for size in SIZES for codes in (False, True) for tile in tiles(size, codes)]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("size", "codes", "tile"), CASES, ids=str)
def test_outputs(size: tuple[int, int, int], codes: bool, tile: Tile, spread: str) -> None:
    torch.manual_seed(1)
    layer = Layer.of(size, SPREADS[spread](size[0]), codes=codes)
    experts, given = hopper(layer), layer.given()
    for each in (16, 1, 16):  # weights read ahead, or not; what a launch leaves is what the next one needs
        scratch, out = layer.room(experts)
        experts.run(given, scratch, out, rows_per_expert=each, tile=tile)
        check(layer, out)


@BOTH
def test_rows_are_read_where_they_lie(codes: bool) -> None:
    torch.manual_seed(2)
    layer = Layer.of((16, 512, 256), [n % 7 for n in range(15)] + [170], codes=codes)
    experts, given = hopper(layer), layer.given()
    held = torch.full((300, 512 + 64), float("nan"), device="cuda", dtype=BF16)
    ids = torch.randperm(300, device="cuda")[: len(layer.rows)]
    held[ids, :512] = layer.rows
    index = replace(given, rows=held[:, :512], row_ids=F.pad(ids, (0, SPARE)))
    assert experts.takes(index, 4)
    for tile in tiles((16, 512, 256), codes):
        scratch, out = layer.room(experts)
        experts.run(index, scratch, out, rows_per_expert=4, tile=tile)
        check(layer, out)


@BOTH
def test_rows_may_be_many_gigabytes_apart(codes: bool) -> None:
    """Numbers of pieces of 16 bytes then take all of 32 bits."""
    torch.manual_seed(13)
    layer = Layer.of((2, 256, 128), [1, 2], codes=codes)
    experts, given, apart = hopper(layer), layer.given(), 17 << 29  # of BF16: 17 GiB
    held = torch.empty(2 * apart + 256, device="cuda", dtype=BF16).as_strided((3, 256), (apart, 1))
    held.copy_(layer.rows)
    ids = torch.arange(3, device="cuda")
    index = replace(given, rows=held, row_ids=F.pad(ids, (0, SPARE)))
    for tile in tiles((2, 256, 128), codes):
        scratch, out = layer.room(experts)
        experts.run(index, scratch, out, rows_per_expert=4, tile=tile)
        check(layer, out)
    del held, index
    torch.cuda.empty_cache()  # 34 GiB that other processes may need


@BOTH
def test_tiles_do_not_change_a_bit_and_a_graph_can_be_replayed(codes: bool) -> None:
    torch.manual_seed(3)
    layer = Layer.of((64, 1024, 384), [(n * 7) % 131 for n in range(64)], codes=codes)
    experts, given = hopper(layer), layer.given()
    outs = []
    for tile in tiles((64, 1024, 384), codes):
        scratch, out = layer.room(experts)
        experts.run(given, scratch, out, rows_per_expert=16, tile=tile)
        outs.append(out[: len(layer.rows)].clone())
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    scratch, out = layer.room(experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            experts.run(given, scratch, out, rows_per_expert=16)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
    assert torch.equal(outs[0], out[: len(layer.rows)])


@BOTH
def test_launches_behind_each_other_do_what_they_do_apart(codes: bool) -> None:
    """The kernel behind is set up while `out` is written, and counters turn from launch to launch."""
    torch.manual_seed(6)
    layer = Layer.of((16, 512, 256), [n * 5 % 23 for n in range(16)], codes=codes)
    experts, given, ones = hopper(layer), layer.given(), torch.ones(512, device="cuda", dtype=BF16)
    none = replace(given, counts=torch.zeros_like(given.counts), offsets=torch.zeros_like(given.offsets))

    def chain(between: Callable[[], None]) -> torch.Tensor:
        rows, (scratch, out) = given.rows.clone(), layer.room(experts)
        for turn, each in enumerate((1, 45, 16, 128, 32, 64)):  # 128: a wide tile where weights allow it
            between()
            experts.run(replace(given, rows=rows), scratch, out, rows_per_expert=each)
            between()
            rms_norm(out, ones, 1e-6, rows)  # lets the next one begin at once
            if turn % 2:
                between()
                experts.run(none, scratch, out, rows_per_expert=each)
        torch.cuda.synchronize()
        return rows[: len(layer.rows)]

    apart = chain(torch.cuda.synchronize)
    assert apart.isfinite().all()
    assert all(torch.equal(apart, chain(lambda: None)) for _ in range(20))


@BOTH
def test_launches_beside_each_other_do_not_wait_for_each_other(codes: bool) -> None:
    """Each of two streams has some of the multiprocessors; blocks that are set up late are not awaited."""
    torch.manual_seed(12)
    layers = [Layer.of((24, 1024, 512), [n * 5 % 23 for n in range(24)], codes=codes) for _ in range(2)]
    runs = [(hopper(layer), layer.given(), layer.room(hopper(layer))) for layer in layers]
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    for turn in range(40):
        each = (1, 16, 45, 128)[turn % 4]  # 128: wide tiles, of bfloat16
        for stream, (experts, given, (scratch, out)) in zip(streams, runs, strict=True):
            with torch.cuda.stream(stream):
                experts.run(given, scratch, out, rows_per_expert=each)
    torch.cuda.synchronize()
    for layer, (_, _, (_, out)) in zip(layers, runs, strict=True):
        check(layer, out)


@BOTH
@pytest.mark.parametrize("each", [1, 32, 128])
def test_numbers_of_a_dispatch_that_failed_lead_nowhere(each: int, codes: bool) -> None:
    """Counts, places and numbers of rows are anything; then a launch on the same counters is right."""
    torch.manual_seed(4)
    layer = Layer.of((6, 256, 128), [3, 0, 40, 1, 0, 7], codes=codes)
    experts, given = hopper(layer), layer.given()
    most = len(layer.rows) + SPARE
    wild = replace(
        given,
        counts=torch.tensor([2**31 - 1, -5, 1000, 0, 2**30, -(2**31)], dtype=torch.int32, device="cuda"),
        offsets=torch.tensor([0, 2**40, -3, 7, 5, most + 1, 2**62], device="cuda"),
        row_ids=torch.tensor([2**62, -1, 3] * most, device="cuda")[:most],
    )
    needed = experts.scratch_bytes(most)
    scratch = torch.full((needed + 4096,), 1, device="cuda", dtype=torch.uint8)
    out = torch.full((most + 64, 256), -1.0, device="cuda", dtype=BF16)
    experts.run(wild, scratch[:needed], out[:most], rows_per_expert=each)
    torch.cuda.synchronize()
    assert bool((scratch[needed:] == 1).all()) and bool((out[most:] == -1).all())
    scratch, out = layer.room(experts)
    experts.run(given, scratch, out, rows_per_expert=each)
    check(layer, out)


def test_more_tiles_of_rows_than_16_bits_count() -> None:
    torch.manual_seed(5)
    layer = Layer.of((3, 128, 64), [40, 70_000 * 32, 40])
    experts = hopper(layer)
    scratch, out = layer.room(experts)
    experts.run(layer.given(), scratch, out, rows_per_expert=1)
    check(layer, out)


@pytest.mark.parametrize(
    ("size", "codes", "refused"),
    [
        ((5, 256, 128), False, [Tile(160), Tile(33), Tile(0), Tile(64, wide=True)]),
        ((5, 384, 128), False, WIDE),
        ((5, 256, 192), False, WIDE),
        ((5, 256, 128), True, [Tile(128), *WIDE]),
    ],
    ids=str,
)
def test_tiles_that_there_are_none_of(size: tuple[int, int, int], codes: bool, refused: list[Tile]) -> None:
    layer = Layer.of(size, [1] * 5, codes=codes)
    experts = hopper(layer)
    scratch, out = layer.room(experts)
    for tile in refused:
        with pytest.raises(ValueError, match=r"^(rows_of_tile|wide): "):
            experts.run(layer.given(), scratch, out, rows_per_expert=1, tile=tile)
    assert bool(out.isnan().all())


def test_rows_that_are_for_the_other_kernels() -> None:
    layer = Layer.of((5, 256, 128), [1] * 5)
    experts, given = hopper(layer), layer.given()
    assert not experts.takes(replace(given, rows=given.rows.to(FP8)), 1)
    assert experts.takes(given, MOST_PER_EXPERT + 1)
    of_codes = hopper(Layer.of((5, 256, 128), [1] * 5, codes=True))
    assert [of_codes.takes(given, MOST_PER_EXPERT + more) for more in (0, 1)] == [True, False]
    assert not experts.takes(replace(given, rows=given.rows.view(-1, 1, 256)), 1)
    assert not experts.takes(replace(given, rows=given.rows.float()), 1)
    wide = torch.empty(5, 257, device="cuda", dtype=BF16)
    assert not experts.takes(replace(given, rows=wide[:, 1:]), 1)


def test_weights_that_have_no_kernel() -> None:
    def codes(ffn: int) -> ExpertWeights:
        blocks = -(-ffn // 128)
        return ExpertWeights(
            torch.zeros(2, 2 * ffn, 256, device="cuda").to(FP8),
            torch.zeros(2, 256, ffn, device="cuda").to(FP8),
            torch.ones(2, 2 * blocks, 2, device="cuda"),
            torch.ones(2, 2, blocks, device="cuda"),
        )

    def weights(experts: int, width: int, ffn: int, dtype: torch.dtype = BF16) -> ExpertWeights:
        return ExpertWeights(
            torch.empty(experts, 2 * ffn, width, dtype=dtype, device="cuda"),
            torch.empty(experts, width, ffn, dtype=dtype, device="cuda"),
        )

    if torch.cuda.get_device_capability()[0] == 9:
        assert hopper_fits(weights(2, 256, 128)) and hopper_fits(codes(128))
    assert not hopper_fits(codes(192))
    assert not hopper_fits(weights(2, 192, 128))
    assert not hopper_fits(weights(2, 256, 96))
    assert not hopper_fits(weights(513, 256, 128))
    assert not hopper_fits(weights(0, 256, 128))
    assert not hopper_fits(weights(2, 256, 128, torch.float32))
