"""Latent attention of one layer with one token per sequence on one GPU: Triton's, ours, and the bound.

    python3 benchmarks/gpu_latent.py [--batch 32,64,128,256] [--context 256,1024] [--heads 16,128] [--configs]
    python3 benchmarks/gpu_latent.py --batch 1,4,8,16 --context 256,1024,4096 --heads 16 --configs

Both in a graph of as many layers as pass L2, each result checked against torch first. Times in microseconds
of a layer, median of replays. The bound: bytes of cache, queries and answers, and for many heads the products
at 800 TFLOPS. --configs: other ways to launch ours, warpgroups of a team x parts of a context.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import ceil

import torch
from gpu_timing import BF16, RATE, arguments, in_graph

from ep_server.backends.gpu.attention.decode_kernels import triton_decode
from ep_server.backends.gpu.kernels.hopper.mla import (
    HopperMla,
    HopperMlaStep,
    MlaLaunchConfig,
    mla_launch_config_for,
)
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.step_input import Singles, StepTensors
from ep_server.models.families.spec import MlaSpec
from ep_server.models.kv_cache import KvLayer

DIM, LATENT, BLOCK, LONGEST, NUM_SMS = 576, 512, 16, 4096, 132
FLOPS = 800e12
ALONE = 32  # heads, up to which warpgroups can share a context
PASSES_L2, MOST_SETS = 1.2e8, 200  # bytes; caches
POWERS = (1, 2, 4, 8, 16)


class Case:
    """Sequences of one length, their blocks in no order, and as many caches as pass L2."""

    def __init__(self, heads: int, batch: int, context: int) -> None:
        held = -(-context // BLOCK)
        self.heads, self.batch, self.context = heads, batch, context
        self.sets = max(2, min(MOST_SETS, ceil(PASSES_L2 / (batch * held * BLOCK * DIM * 2))))
        self.spec = MlaSpec(heads, 0, LATENT, 128, DIM - LATENT, 128, DIM**-0.5)
        size = (batch * held, BLOCK, 1, DIM)
        self.caches = [
            PagedKv(KvLayer(torch.randn(size, device="cuda", dtype=BF16), None, LATENT))
            for _ in range(self.sets)
        ]
        self.blocks = torch.randperm(batch * held, device="cuda").int().view(batch, held)
        lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        none = torch.zeros(batch, dtype=torch.int32, device="cuda")
        self.step = StepTensors(
            none, none, none, none, none, self.blocks, lengths, Singles(lengths, none), None, None, none
        )
        self.q = torch.randn(batch, heads, DIM, device="cuda", dtype=BF16)
        self.out = torch.empty(batch, heads, LATENT, device="cuda", dtype=BF16)
        self.kernels = [HopperMla(kv, self.spec) for kv in self.caches]
        sequences = Sequences(self.blocks, lengths)
        self.layer = triton_decode(self.spec, LONGEST, NUM_SMS).over(sequences)

    def triton(self, which: int) -> None:
        self.layer(self.q, self.caches[which], AttentionRule(self.spec.scale), self.out)

    def hopper(self, config: MlaLaunchConfig) -> Callable[[int], None]:
        step = HopperMlaStep(self.step, self.heads, config)
        return lambda which: self.kernels[which].run(self.q, step, self.out)

    def error(self) -> float:
        """Of `out`, against torch on the first set."""
        keys = self.caches[0].layer.k[self.blocks.long()].flatten(1, 3)[:, : self.context].float()
        weights = torch.softmax(self.q.float() @ keys.transpose(1, 2) * self.spec.scale, 2)
        wanted = weights @ keys[..., :LATENT]
        return float((self.out - wanted).norm() / wanted.norm())

    def bound(self) -> float:
        """us."""
        moved = self.batch * (self.context * DIM + self.heads * (DIM + LATENT)) * 2
        products = 2.0 * self.batch * self.context * self.heads * (DIM + LATENT)
        return max(moved / RATE, products / FLOPS) * 1e6


def compare(case: Case, configs: dict[str, MlaLaunchConfig]) -> None:
    work: dict[str, Callable[[int], None]] = {"triton": case.triton}
    work |= {name: case.hopper(config) for name, config in configs.items()}
    found = []
    for name, one in work.items():
        case.out.fill_(float("nan"))
        one(0)
        error = case.error()
        found.append(
            f"{name} {in_graph(one, case.sets):.1f}" if error < 0.01 else f"{name} WRONG {error:.3f}"
        )
    print(
        f"heads {case.heads}, batch {case.batch}, context {case.context}: {', '.join(found)}, "
        f"bound {case.bound():.1f}",
        flush=True,
    )


def others(heads: int, batch: int) -> dict[str, MlaLaunchConfig]:
    """Other ways to launch ours."""
    if heads > ALONE:
        items = batch * ceil(heads / (2 * ALONE))
        configs = [MlaLaunchConfig(1, NUM_SMS, n) for n in POWERS if n <= max(4, NUM_SMS // items)]
        return {f"splits {each.splits}": each for each in configs}
    configs = [MlaLaunchConfig(n, NUM_SMS) for n in POWERS if n * batch <= 4 * NUM_SMS]
    configs += [
        MlaLaunchConfig(team, NUM_SMS, splits)
        for team, splits in itertools.product(POWERS[1:], POWERS[1:])
        if team * splits * batch <= 2 * NUM_SMS
    ]
    return {f"{each.team} x {each.splits}": each for each in configs}


def main() -> None:
    parser = arguments(__doc__, heads="16,128", batch="32,64,128,256", context="256,1024")
    parser.add_argument("--configs", action="store_true")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for heads, context, batch in itertools.product(given.heads, given.context, given.batch):
        configs = {"hopper": mla_launch_config_for(batch, heads, NUM_SMS, LONGEST)}
        if given.configs:
            configs |= others(heads, batch)
        compare(Case(heads, batch, context), configs)


if __name__ == "__main__":
    main()
