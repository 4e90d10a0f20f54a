"""The kernels that a runner is given are those that its layers call, once per layer of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from ep_server.backends.gpu.attention import decode_kernels
from ep_server.backends.gpu.attention.decode_kernels import DecodeKernels, DecodeLayer, triton_decode
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.paged_decode import Workspace
from ep_server.models.families import read_spec
from ep_server.models.families.spec import MlaSpec
from ep_server.models.kv_cache import KvLayer
from tests.support.gpu.runners import gpu_runner
from tests.support.models.checkpoints import Tiny
from tests.support.models.driver import generate
from tests.support.ranks.rank_group import greedy


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


def test_a_step_whose_layers_have_other_kernels_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one workspace serves all layers that have not."""
    made: list[Workspace] = []

    class Watched(Workspace):
        @staticmethod
        def of(sequences: int, heads: int, splits: int, v_dim: int, device: torch.device) -> Workspace:
            made.append(Workspace.of(sequences, heads, splits, v_dim, device))
            return made[-1]

    monkeypatch.setattr(decode_kernels, "Workspace", Watched)
    monkeypatch.setattr(decode_kernels, "decode", lambda *given: used.append(given[4]))
    used: list[Workspace] = []
    lengths = torch.tensor([3, 0], dtype=torch.int32)
    spec = MlaSpec(128, 0, 512, 128, 64, 128, 0.1)
    layer = triton_decode(spec, 4096, 132).over(Sequences(lengths.view(2, 1), lengths))
    assert made == []
    kv, q = PagedKv(KvLayer(torch.zeros(1, 16, 1, 576), None, 512)), torch.zeros(2, 128, 576)
    for _ in range(3):
        layer(q, kv, AttentionRule(1.0), torch.zeros(2, 128, 512))
    assert [each.sums.shape for each in made] == [(2, 128, 16, 512)]
    assert len(used) == 3 and all(each is made[0] for each in used)
