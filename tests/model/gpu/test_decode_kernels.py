"""The kernels that a runner is given are those that its layers call, once per layer of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ep_server.model.families import read_spec
from ep_server.model.gpu.decode_kernels import DecodeKernels, DecodeLayer, triton_decode
from ep_server.model.triton.paged_tile import Sequences
from tests.harness.checkpoints import Tiny
from tests.harness.rank_group import greedy
from tests.model.driver import generate
from tests.model.gpu.test_parity import gpu_runner


@dataclass
class Counted:
    """steps: made by over(). layers: calls with sequences."""

    inner: DecodeKernels
    steps: int = 0
    layers: int = 0

    def over(self, sequences: Sequences) -> DecodeLayer:
        self.steps += 1
        layer = self.inner.over(sequences)

        def counted(q: torch.Tensor, *rest: object) -> None:
            self.layers += 1
            layer(q, *rest)  # type: ignore[arg-type]

        return counted


def test_every_layer_of_a_step_uses_them(tiny: Callable[[str], Tiny]) -> None:
    model, count = tiny("qwen3_moe"), 2
    spec = read_spec(model.path)
    kernels = Counted(triton_decode(spec.attention, spec.max_context, 0))
    runner = gpu_runner(model.path, kernels=kernels)
    for number, prompt in enumerate(model.prompts[:2]):
        runner.add(greedy(number, prompt, count))
    drawn = generate(runner, model.prompts[:2], count)
    assert drawn == [tokens[:count] for tokens in model.tokens[:2]]
    assert kernels.steps >= count and kernels.layers == spec.num_layers * kernels.steps
