"""The experts' kernel for Hopper against float32 sums of torch, for every way that rows can be spread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from ep_server.model.gpu.streamed_experts import MOST_PER_EXPERT, StreamedExperts, streamable
from ep_server.model.triton.expert_rows import ExpertRows, ExpertWeights
from ep_server.model.triton.norm import rms_norm

pytestmark = pytest.mark.gpu
BF16, SPARE = torch.bfloat16, 9
SIZES = [(5, 256, 128), (128, 2048, 768), (300, 512, 256), (3, 4096, 14336)]
SPREADS = {
    "none": lambda e: [0] * e,
    "one": lambda e: [0] * (e - 1) + [1],
    "few": lambda e: [n % 4 for n in range(e)],
    "tiles": lambda e: [(15, 16, 17, 31, 32, 33, 63, 64, 65, 0)[n % 10] for n in range(e)],
    "all to one": lambda e: [0] * (e // 2) + [200] + [0] * (e - e // 2 - 1),
}


@dataclass(frozen=True)
class Layer:
    """Weights, rows by expert, and what comes of them in float32 with one rounding between."""

    weights: ExpertWeights
    counts: list[int]
    rows: torch.Tensor

    @staticmethod
    def of(size: tuple[int, int, int], counts: list[int]) -> Layer:
        experts, width, ffn = size
        gate_up = torch.randn(experts, 2 * ffn, width, device="cuda") * width**-0.5
        down = torch.randn(experts, width, ffn, device="cuda") * ffn**-0.5
        rows = torch.randn(sum(counts), width, device="cuda").to(BF16)
        return Layer(ExpertWeights(gate_up.to(BF16), down.to(BF16)), counts, rows)

    def given(self) -> ExpertRows:
        """With room for more rows than come."""
        counts = torch.tensor(self.counts, device="cuda")
        rows = F.pad(self.rows, (0, 0, 0, SPARE), value=float("nan"))
        return ExpertRows(rows, counts.int(), F.pad(counts.cumsum(0), (1, 0)))

    def expected(self) -> torch.Tensor:
        found = []
        for e, rows in enumerate(self.rows.split(self.counts)):
            gate, up = (rows.float() @ self.weights.gate_up[e].float().T).chunk(2, dim=-1)
            found.append((F.silu(gate) * up).to(BF16).float() @ self.weights.down[e].float().T)
        return torch.cat(found)

    def room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden and out, poisoned."""
        most, nan = len(self.rows) + SPARE, float("nan")
        width, ffn = self.weights.down.shape[1:]
        return (
            torch.full((most, ffn), nan, device="cuda", dtype=BF16),
            torch.full((most, width), nan, device="cuda", dtype=BF16),
        )


def check(layer: Layer, out: torch.Tensor) -> None:
    found, expected = out[: len(layer.rows)].float(), layer.expected()
    assert out[len(layer.rows) :].isnan().all()
    torch.testing.assert_close(
        found, expected, rtol=2e-2, atol=2e-2 * float(expected.std() if found.numel() > 1 else 1)
    )


def streamed(layer: Layer) -> StreamedExperts:
    if not streamable(layer.weights):
        pytest.skip("the kernel is for Hopper")
    return StreamedExperts(layer.weights)


@pytest.mark.parametrize("each", [1, 16, 32, 45, 64, 128])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_outputs(size: tuple[int, int, int], spread: str, each: int) -> None:
    torch.manual_seed(1)
    layer = Layer.of(size, SPREADS[spread](size[0]))
    experts, given = streamed(layer), layer.given()
    for _ in range(3):  # what a launch leaves behind is what the next one needs
        hidden, out = layer.room()
        experts.run(given, hidden, out, rows_per_expert=each)
        check(layer, out)


def test_rows_are_read_where_they_lie() -> None:
    torch.manual_seed(2)
    layer = Layer.of((16, 512, 256), [n % 7 for n in range(16)])
    experts, given = streamed(layer), layer.given()
    held = torch.full((100, 512 + 64), float("nan"), device="cuda", dtype=BF16)
    ids = torch.randperm(100, device="cuda")[: len(layer.rows)]
    held[ids, :512] = layer.rows
    index = replace(given, rows=held[:, :512], row_ids=F.pad(ids, (0, SPARE)))
    assert experts.takes(index, 4)
    hidden, out = layer.room()
    experts.run(index, hidden, out, rows_per_expert=4)
    check(layer, out)


def test_tiles_do_not_change_a_bit_and_a_graph_can_be_replayed() -> None:
    torch.manual_seed(3)
    layer = Layer.of((64, 1024, 384), [(n * 7) % 40 for n in range(64)])
    experts, given = streamed(layer), layer.given()
    outs = []
    for each in (1, 16, 32, 45, 64, 128):
        hidden, out = layer.room()
        experts.run(given, hidden, out, rows_per_expert=each)
        outs.append(out[: len(layer.rows)].clone())
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    hidden, out = layer.room()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            experts.run(given, hidden, out, rows_per_expert=16)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
    assert torch.equal(outs[0], out[: len(layer.rows)])


def test_launches_behind_each_other_do_what_they_do_apart() -> None:
    """The kernel behind is set up while `out` is written, and counters turn from launch to launch."""
    torch.manual_seed(6)
    layer = Layer.of((16, 512, 256), [n * 5 % 23 for n in range(16)])
    experts, given, ones = streamed(layer), layer.given(), torch.ones(512, device="cuda", dtype=BF16)
    none = replace(given, counts=torch.zeros_like(given.counts), offsets=torch.zeros_like(given.offsets))

    def chain(between: Callable[[], None]) -> torch.Tensor:
        rows, (hidden, out) = given.rows.clone(), layer.room()
        for turn, each in enumerate((1, 45, 16, 128, 32, 64)):
            between()
            experts.run(replace(given, rows=rows), hidden, out, rows_per_expert=each)
            between()
            rms_norm(out, ones, 1e-6, rows)  # lets the next one begin at once
            if turn % 2:
                between()
                experts.run(none, hidden, out, rows_per_expert=each)
        torch.cuda.synchronize()
        return rows[: len(layer.rows)]

    apart = chain(torch.cuda.synchronize)
    assert apart.isfinite().all()
    assert all(torch.equal(apart, chain(lambda: None)) for _ in range(20))


@pytest.mark.parametrize("each", [1, 32, 128])
def test_numbers_of_a_dispatch_that_failed_lead_nowhere(each: int) -> None:
    """Counts, places and numbers of rows are anything; then a launch on the same counters is right."""
    torch.manual_seed(4)
    layer = Layer.of((6, 256, 128), [3, 0, 40, 1, 0, 7])
    experts, given = streamed(layer), layer.given()
    guard, most = 64, len(layer.rows) + SPARE
    wild = replace(
        given,
        counts=torch.tensor([2**31 - 1, -5, 1000, 0, 2**30, -(2**31)], dtype=torch.int32, device="cuda"),
        offsets=torch.tensor([0, 2**40, -3, 7, 5, most + 1, 2**62], device="cuda"),
        row_ids=torch.tensor([2**62, -1, 3] * most, device="cuda")[:most],
    )
    hidden, out = (torch.full((most + guard, n), -1.0, device="cuda", dtype=BF16) for n in (128, 256))
    experts.run(wild, hidden[:most], out[:most], rows_per_expert=each)
    torch.cuda.synchronize()
    assert bool((hidden[most:] == -1).all()) and bool((out[most:] == -1).all())
    hidden, out = layer.room()
    experts.run(given, hidden, out, rows_per_expert=each)
    check(layer, out)


def test_more_tiles_of_rows_than_16_bits_count() -> None:
    torch.manual_seed(5)
    layer = Layer.of((3, 128, 64), [40, 70_000 * 32, 40])
    hidden, out = layer.room()
    streamed(layer).run(layer.given(), hidden, out, rows_per_expert=1)
    check(layer, out)


def test_rows_that_are_for_the_other_kernels() -> None:
    layer = Layer.of((5, 256, 128), [1] * 5)
    experts, given = streamed(layer), layer.given()
    assert experts.takes(given, MOST_PER_EXPERT)
    assert not experts.takes(given, MOST_PER_EXPERT + 1)
    assert not experts.takes(replace(given, rows=given.rows.view(-1, 1, 256)), 1)
    assert not experts.takes(replace(given, rows=given.rows.float()), 1)
    wide = torch.empty(5, 257, device="cuda", dtype=BF16)
    assert not experts.takes(replace(given, rows=wide[:, 1:]), 1)


def test_weights_that_have_no_kernel() -> None:
    def weights(experts: int, width: int, ffn: int, dtype: torch.dtype = BF16) -> ExpertWeights:
        return ExpertWeights(
            torch.empty(experts, 2 * ffn, width, dtype=dtype, device="cuda"),
            torch.empty(experts, width, ffn, dtype=dtype, device="cuda"),
        )

    if torch.cuda.get_device_capability()[0] == 9:
        assert streamable(weights(2, 256, 128))
    assert not streamable(weights(2, 192, 128))
    assert not streamable(weights(2, 256, 96))
    assert not streamable(weights(513, 256, 128))
    assert not streamable(weights(0, 256, 128))
    assert not streamable(weights(2, 256, 128, torch.float32))
