"""What the attention kernel reads before the kernel ahead has ended: every bit as if each had ended first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from ep_server.backends.gpu.kernels.hopper.attention import HopperAttentionStep, LaunchConfig
from ep_server.backends.gpu.kernels.hopper.products import HopperProduct
from ep_server.backends.gpu.kernels.triton.embedding import RowTokens, embed
from ep_server.backends.gpu.step_input import InputShape, StepInput, StepTensors
from ep_server.records import SeqSlice, StepBatch
from tests.support.gpu.attention_case import BF16, DIM, EPS, NAN, Case, bits

pytestmark = pytest.mark.gpu
FIRST = [5, 120, 15, 250, 1, 64]  # lengths that the steps begin at
STEPS, MICRO_BATCHES, ROWS, HIDDEN, VOCAB, BLOCK, WIDEST = 12, 2, 8, 512, 64, 16, 32


class OneLayer:
    """A model as far as the attention of its only layer, which runs two tokens of every sequence in a step.

    The second one is of the other micro-batch, as the rest of a chunk that was cut may be: its kernel reads
    what that of the first has just written, with one projection between them.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.case = Case.of([n + MICRO_BATCHES * STEPS for n in FIRST])
        for blocks, first in zip(self.case.blocks, FIRST, strict=True):
            for position in range(first - 1, len(blocks) * BLOCK):
                for cache in self.case.caches:
                    cache[blocks[position // BLOCK] * BLOCK + position % BLOCK] = NAN
        self.was = [cache.clone() for cache in self.case.caches]
        shape, device = InputShape(ROWS, ROWS, WIDEST, BLOCK), self.was[0].device
        self.inputs = [StepInput(shape, device, STEPS) for _ in range(MICRO_BATCHES)]
        width = (self.case.spec.heads + 2 * self.case.spec.kv_heads) * DIM
        weight = torch.randn(width, HIDDEN, device="cuda") * HIDDEN**-0.5
        self.product, self.kernel, self.config = HopperProduct(weight.to(BF16)), self.case.kernel(), config
        self.embedding = torch.randn(VOCAB, HIDDEN, device="cuda").to(BF16)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=BF16)
        self.drawn = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        self.out = torch.empty(MICRO_BATCHES, ROWS, self.case.spec.heads, DIM, device="cuda", dtype=BF16)

    def batch(self, token: int) -> StepBatch:
        """Of every sequence its token-th from FIRST on, in an order of sequences that changes."""
        slices = [
            SeqSlice(n, first - 1 + token, ((5 * token + n) % VOCAB,), self.case.blocks[n], True, 1)
            for n, first in enumerate(FIRST)
        ]
        turned = token % len(slices)
        return StepBatch(tuple(slices[turned:] + slices[:turned]), len(slices))

    def fill(self, step: int) -> list[StepTensors]:
        return [
            given.fill(self.batch(MICRO_BATCHES * step + which), {}, ROWS)
            for which, given in enumerate(self.inputs)
        ]

    def layer(self, steps: Sequence[StepTensors], after_each: Callable[[], None] = lambda: None) -> None:
        normed = []
        shared = [HopperAttentionStep(step, self.case.spec, self.config) for step in steps]
        after_each()
        for step in steps:
            residual, x = (torch.empty(ROWS, HIDDEN, device="cuda", dtype=BF16) for _ in range(2))
            tokens = RowTokens(step.ids, step.sources, self.drawn)
            embed(tokens, self.embedding, self.norm, EPS, residual, x)
            normed.append(x)
            after_each()
        for step, x, out in zip(shared, normed, self.out, strict=True):
            qkv = self.product(x)
            after_each()
            self.kernel.run(qkv, step, out)
            after_each()

    def run(self, layer: Callable[[list[StepTensors]], None]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """All steps on the cache as it was. Returns: the answers of each, and the cache behind them."""
        for cache, was in zip(self.case.caches, self.was, strict=True):
            cache.copy_(was)
        answers = []
        for step in range(STEPS):
            self.out.fill_(NAN)
            layer(self.fill(step))
            answers.append(self.out.clone())
        torch.cuda.synchronize()  # before the input's memory on the host is written again
        return torch.stack(answers), [bits(cache).clone() for cache in self.case.caches]


@pytest.mark.parametrize(
    "config",
    [LaunchConfig(1, 132), LaunchConfig(8, 132, 16), LaunchConfig(4, 132), LaunchConfig(2, 3)],
    ids=str,
)
def test_steps_right_behind_each_other(config: LaunchConfig) -> None:
    model = OneLayer(config)
    wanted, cache = model.run(lambda steps: model.layer(steps, torch.cuda.synchronize))
    assert wanted[:, :, : len(FIRST)].isfinite().all() and not wanted[:, :, len(FIRST) :].any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.layer([given.padded(ROWS) for given in model.inputs])
    for layer in (model.layer, lambda _: graph.replay()):
        for _ in range(3):
            got, left = model.run(layer)
            assert torch.equal(got, wanted)
            assert all(torch.equal(a, b) for a, b in zip(left, cache, strict=True))
