"""What stands between the query-key-value product and the output product of a layer, on one Hopper GPU.

    python3 benchmarks/gpu_hopper_attention.py --batch 32,64,128,256 --context 256 [--longest 0,16384]

One kernel (csrc/kernels/hopper/attention) beside Triton's two, norm, rotation and cache write, then
attention: behind the product, in graphs replayed in turn, caches rotated past L2; the product's own time is
taken off. Results are compared first. Microseconds, median of replays; bound: keys and values at 4.5 TB/s.
--longest: the context of the last sequence, 0 = as the others. --configs: other ways to launch ours.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
from gpu_timing import BF16, RATE, REPLAYS, arguments, captured, time_us

from ep_server.backends.gpu.attention.decode_kernels import triton_decode
from ep_server.backends.gpu.kernels.hopper.attention import (
    HopperAttention,
    HopperAttentionStep,
    LaunchConfig,
    launch_config_for,
)
from ep_server.backends.gpu.kernels.triton.paged import AttentionRule, PagedKv, Sequences
from ep_server.backends.gpu.kernels.triton.rope import HeadNorm, Rotation, store_gqa
from ep_server.backends.gpu.step_input import Singles, StepTensors
from ep_server.models.families.spec import GqaSpec
from ep_server.models.kv_cache import KvLayer

DIM, HIDDEN = 128, 2048
SPEC = GqaSpec(32, 4, DIM, DIM**-0.5)
BLOCK, LONGEST, NUM_SMS, WARM_UPS = 16, 4096, 132, 5


class Case:
    """Sequences of one length, but for the last, their blocks in no order, and caches that pass L2."""

    def __init__(self, batch: int, context: int, longest: int) -> None:
        contexts = [context] * (batch - 1) + [longest or context]
        held = [-(-each // BLOCK) for each in contexts]
        self.batch, self.name = batch, f"batch {batch}, context {context}" + f", {longest}" * (longest > 0)
        self.bytes = sum(held) * BLOCK * 4 * DIM * SPEC.kv_heads
        self.sets = max(4, min(16, int(1.5e9 / self.bytes)))
        size = (sum(held), BLOCK, SPEC.kv_heads, DIM)
        self.caches = [
            PagedKv(KvLayer(*(torch.randn(size, device="cuda", dtype=BF16) for _ in "kv"), DIM))
            for _ in range(self.sets)
        ]
        tables = torch.randperm(sum(held), device="cuda").int().split(held)
        blocks = torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True)
        lengths = torch.tensor(contexts, dtype=torch.int32, device="cuda")
        ends = torch.stack([table[-1] for table in tables])
        slots = (ends * BLOCK + (lengths - 1) % BLOCK).int()
        none = torch.zeros(batch, dtype=torch.int32, device="cuda")
        positions = lengths - 1
        self.step = StepTensors(
            none, none, none, positions, slots, blocks, lengths, Singles(lengths, slots), None, None, none
        )
        width = (SPEC.heads + 2 * SPEC.kv_heads) * DIM
        self.weight = torch.randn(width, HIDDEN, device="cuda", dtype=BF16) * 0.02
        self.x = torch.randn(batch, HIDDEN, device="cuda", dtype=BF16)
        self.norm = HeadNorm(torch.ones(SPEC.heads + SPEC.kv_heads, DIM, device="cuda", dtype=BF16), 1e-6)
        angles = torch.rand(max(contexts) + 1, DIM // 2, device="cuda") * 6.3
        self.turns = torch.stack((angles.cos(), angles.sin()), -1)
        self.out = torch.empty(batch, SPEC.heads, DIM, device="cuda", dtype=BF16)
        self.kernels = [HopperAttention(kv, SPEC, self.turns, self.norm) for kv in self.caches]
        self.layer = triton_decode(SPEC, LONGEST, NUM_SMS).over(Sequences(blocks, lengths))

    def product(self, which: int) -> torch.Tensor:
        return torch.mm(self.x, self.weight.T)

    def triton(self, which: int) -> None:
        q, kv = torch.empty_like(self.out), self.caches[which]
        rotation = Rotation(self.turns, self.step.positions, self.step.slots)
        store_gqa(self.product(which), q, kv, rotation, self.norm)
        self.layer(q, kv, AttentionRule(SPEC.scale), self.out)

    def hopper(self, config: LaunchConfig) -> Callable[[int], None]:
        step = HopperAttentionStep(self.step, SPEC, config)
        return lambda which: self.kernels[which].run(self.product(which), step, self.out)

    def bound(self) -> float:
        return self.bytes / RATE * 1e6


def timed(graphs: dict[str, torch.cuda.CUDAGraph], sets: int) -> dict[str, float]:
    """us of one pass of each, replayed in turn."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for replay in range(WARM_UPS + REPLAYS):
        for name, graph in graphs.items():
            one = time_us(graph.replay) / sets
            if replay >= WARM_UPS:
                times[name].append(one)
    return {name: statistics.median(all_of_it) for name, all_of_it in times.items()}


def compare(case: Case, configs: dict[str, LaunchConfig]) -> None:
    case.triton(0)
    wanted = case.out.clone()
    work: dict[str, Callable[[int], object]] = {"product": case.product, "triton": case.triton}
    for name, config in configs.items():
        work[name] = case.hopper(config)
        case.out.fill_(float("nan"))
        work[name](0)
        error = float((case.out - wanted).float().norm() / wanted.float().norm())
        assert error < 0.01, f"{name}: {error}"
    times = timed({name: captured(one, case.sets) for name, one in work.items()}, case.sets)
    base = times.pop("product")
    shown = "  ".join(f"{name} {time - base:.1f}" for name, time in times.items())
    print(
        f"{case.name}: {shown}  bound {case.bound():.1f}  (product alone {base:.1f})",
        flush=True,
    )


def main() -> None:
    parser = arguments(__doc__, batch="32,64,128,256", context="256", longest="0")
    parser.add_argument("--configs", action="store_true")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for context, longest, batch in itertools.product(given.context, given.longest, given.batch):
        configs = {"hopper": launch_config_for(batch, SPEC.kv_heads, NUM_SMS)}
        if given.configs:
            configs |= {f"teams of {team}": LaunchConfig(team, NUM_SMS) for team in (1, 2, 4, 8)}
        compare(Case(batch, context, longest), configs)


if __name__ == "__main__":
    main()
