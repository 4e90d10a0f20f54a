"""What the latent attention kernel reads before the kernel ahead has ended: every bit as if it had ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ep_server.backends.gpu.kernels.hopper.mla import MlaLaunchConfig
from ep_server.backends.gpu.kernels.triton.rope import MlaInput, Rotation, store_mla
from ep_server.models.attention import rotation_table
from ep_server.models.families.spec import RopeSpec
from tests.support.gpu.latent_case import BF16, DIM, LATENT, NAN, LatentCase

pytestmark = pytest.mark.gpu
LENGTHS, BLOCK = [40, 257, 1000, 128, 1], 16


class Layer:
    """As a model runs it: a product's queries, then what stores each token's own latent and turns its query.

    That kernel lets attention start as it begins itself.
    """

    def __init__(self, heads: int, config: MlaLaunchConfig) -> None:
        case = self.case = LatentCase.of(LENGTHS, heads, BLOCK)
        table = torch.view_as_real(rotation_table(RopeSpec(DIM - LATENT, 10000.0), max(LENGTHS)))
        own = torch.tensor([n - 1 for n in LENGTHS], dtype=torch.int32, device="cuda")
        held = case.step.blocks.gather(1, (own // BLOCK).long()[:, None])[:, 0]
        self.slots = held * BLOCK + own % BLOCK
        self.turn = Rotation(table.contiguous().cuda(), own, self.slots)
        rows = torch.randn(len(LENGTHS), DIM, device="cuda").to(BF16)
        turned = torch.randn(len(LENGTHS), heads, DIM - LATENT, device="cuda").to(BF16)
        norm = torch.ones(LATENT, device="cuda", dtype=BF16)
        self.given = MlaInput(rows[:, :LATENT], rows[:, LATENT:], turned, norm, 1e-6)
        self.product, self.query = case.q[..., :LATENT].clone(), torch.empty_like(case.q)
        self.kernel, (self.step, self.out) = case.kernel(), case.given(config)
        torch.cuda.synchronize()  # what the step is given is read before the kernel ahead has ended

    @property
    def own(self) -> torch.Tensor:
        """[S, 576] the tokens' rows of the cache."""
        return self.case.kv.layer.k.view(-1, DIM)[self.slots.long()]

    def forget(self) -> None:
        self.case.kv.layer.k.view(-1, DIM)[self.slots.long()] = NAN
        self.query.fill_(NAN)
        self.out.fill_(NAN)

    def run(self, after_each: Callable[[], None] = lambda: None) -> None:
        torch.cuda._sleep(100_000)
        self.query[..., :LATENT].copy_(self.product)
        after_each()
        store_mla(self.given, self.query[..., LATENT:], self.case.kv, self.turn)
        after_each()
        self.kernel.run(self.query, self.step, self.out)


@pytest.mark.parametrize(
    ("heads", "config"),
    [
        (16, MlaLaunchConfig(1, 132)),
        (16, MlaLaunchConfig(4, 132)),
        (32, MlaLaunchConfig(4, 132, 8)),
        (128, MlaLaunchConfig(1, 132)),
        (128, MlaLaunchConfig(1, 132, 2)),
    ],
    ids=str,
)
def test_its_own_token_is_stored_by_the_kernel_ahead(heads: int, config: MlaLaunchConfig) -> None:
    layer = Layer(heads, config)
    layer.forget()
    layer.run(torch.cuda.synchronize)
    wanted, layer.case.q = layer.out.clone(), layer.query.clone()
    for latents, own in zip(layer.case.latents, layer.own, strict=True):
        latents[-1] = own
    layer.case.check(wanted)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run()
    for run in (layer.run, graph.replay) * 5:
        layer.forget()
        run()
        assert torch.equal(layer.out, wanted)
