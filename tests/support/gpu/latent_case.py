"""A paged cache of latents with single tokens to attend from, and attention of torch in float64 over it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from ep_server.backends.gpu.kernels.hopper.mla import (
    HopperMla,
    HopperMlaStep,
    MlaLaunchConfig,
    hopper_mla_fits,
)
from ep_server.backends.gpu.kernels.triton.paged import PagedKv
from ep_server.backends.gpu.step_input import Singles, StepTensors
from ep_server.models.families.spec import MlaSpec
from ep_server.models.kv_cache import KvLayer

BF16, NAN, DIM, LATENT = torch.bfloat16, float("nan"), 576, 512
SPEC = MlaSpec(16, 0, LATENT, 128, DIM - LATENT, 128, 192**-0.5)


@dataclass
class LatentCase:
    """A cache whose unused slots are NaN, and queries; latents: of each sequence, [length, 576]."""

    kv: PagedKv
    spec: MlaSpec
    step: StepTensors
    q: torch.Tensor
    latents: list[torch.Tensor]
    lengths: list[int]

    @staticmethod
    def of(lengths: list[int], heads: int = 16, block: int = 16, spare: int = 3) -> LatentCase:
        """Blocks are dealt out of order; table entries past a sequence's end point far outside.

        spare: blocks of the cache that no sequence has.
        """
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("the kernel is for Hopper")
        torch.manual_seed(len(lengths) + heads)
        counts = [-(-n // block) for n in lengths]
        order = torch.randperm(sum(counts) + spare).tolist()
        table = torch.full((len(lengths), max(counts) + 2), 1 << 29, dtype=torch.int32)
        cache = torch.full((len(order), block, 1, DIM), NAN, device="cuda", dtype=BF16)
        latents = []
        for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            mine, order = order[:count], order[count:]
            table[s, :count] = torch.tensor(mine, dtype=torch.int32)
            places = [mine[p // block] * block + p % block for p in range(length)]
            rows = torch.randn(length, DIM, device="cuda").to(BF16)
            cache.view(-1, DIM)[torch.tensor(places, dtype=torch.int64, device="cuda")] = rows
            latents.append(rows)
        numbers = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        none = torch.zeros(len(lengths), dtype=torch.int32, device="cuda")
        tables = table.cuda()[:, :-1]  # rows have a pitch
        step = StepTensors(
            none, none, none, none, none, tables, numbers, Singles(numbers, none), None, None, none
        )
        q = torch.randn(len(lengths), heads, DIM, device="cuda").to(BF16)
        q[[s for s, n in enumerate(lengths) if n == 0]] = NAN
        kv = PagedKv(KvLayer(cache, None, LATENT))
        torch.cuda.synchronize()  # lengths and tables are read before the kernel ahead has ended
        return LatentCase(kv, replace(SPEC, heads=heads), step, q, latents, lengths)

    def kernel(self) -> HopperMla:
        assert hopper_mla_fits(self.kv, self.spec)
        return HopperMla(self.kv, self.spec)

    def given(self, config: MlaLaunchConfig) -> tuple[HopperMlaStep, torch.Tensor]:
        """What run() takes, of NaN."""
        step = HopperMlaStep(self.step, self.spec.heads, config)
        if step.workspace is not None:
            step.workspace.sums.fill_(NAN)
            step.workspace.stats.fill_(NAN)
        shape = len(self.lengths), self.spec.heads, LATENT
        return step, torch.full(shape, NAN, device="cuda", dtype=BF16)

    def run(self, config: MlaLaunchConfig) -> torch.Tensor:
        step, out = self.given(config)
        self.kernel().run(self.q, step, out)
        return out

    def check(self, out: torch.Tensor) -> None:
        for s, length in enumerate(self.lengths):
            if length == 0:
                assert not out[s].any()
                continue
            keys = self.latents[s].double()
            weights = torch.softmax(self.q[s].double() @ keys.T * self.spec.scale, 1)
            wanted = weights @ keys[:, :LATENT]
            # Rounding gives a third of it at most; a tile that is lost, of any context, ten times as much.
            may = 0.02 * (wanted.abs() + weights.norm(dim=1, keepdim=True))
            off = ((out[s].double() - wanted).abs() / may).nan_to_num(torch.inf).max()
            assert off <= 1, f"sequence {s} of {length}: {float(off):.2f} of what may be"
