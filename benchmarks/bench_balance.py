"""Balance of experts: rows per rank and layer under Zipf routing, with replicas and without.

    python benchmarks/bench_balance.py [--ranks 4 16 64] [--slots 35 9 3] [--copies 0.12] [--seed 1]

Tokens are routed for --steps steps with the first placement. The planner gets these counts and plans until
it has nothing to change. Other steps of the same distribution are then counted with both placements, token
by token, as ranks choose replicas. The sampling floor of a step is what chance alone leaves: as many rows,
each of which goes to any rank with the same probability.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from ep_server.records import WAYS
from ep_server.scheduler import Placement, first_placement
from ep_server.scheduler.balance import BalanceLimits, plan_balance


class Traffic:
    """Zipf routing: distinct experts for each token and layer. Each layer has another order of popularity."""

    def __init__(self, args: argparse.Namespace, ranks: int) -> None:
        self.experts, self.top_k, self.layers = args.experts, args.top_k, args.layers
        self.tokens, self.ranks = args.tokens, ranks
        self.random = torch.Generator().manual_seed(args.seed)
        weights = -args.exponent * torch.arange(1, args.experts + 1).float().log()
        self.logits = torch.stack([weights[self._order()] for _ in range(args.layers)])

    def _order(self) -> torch.Tensor:
        return torch.randperm(self.experts, generator=self.random)

    def step(self, layer: int) -> torch.Tensor:
        """[ranks, tokens, top_k] experts, drawn without replacement by Gumbel keys."""
        uniform = torch.rand(self.ranks, self.tokens, self.experts, generator=self.random)
        return (self.logits[layer] - (-uniform.log()).log()).topk(self.top_k).indices


def counts(traffic: Traffic, steps: int) -> list[list[int]]:
    """By layer, by expert: rows over the steps."""
    found = []
    for layer in range(traffic.layers):
        total = torch.zeros(traffic.experts, dtype=torch.int64)
        for _ in range(steps):
            total += torch.bincount(traffic.step(layer).flatten(), minlength=traffic.experts)
        found.append(total.tolist())
    return found


def rows_of_ranks(traffic: Traffic, placement: Placement, layer: int, steps: int, ways: int) -> torch.Tensor:
    """[steps, ranks] rows, token by token as ranks choose replicas."""
    live = range(traffic.ranks)
    tables = torch.tensor([placement.routes(layer, source, ways, live) for source in live])
    way = (torch.arange(traffic.tokens) % ways)[None, :, None]
    source = torch.arange(traffic.ranks)[:, None, None]
    found = []
    for _ in range(steps):
        slots = tables[source, traffic.step(layer), way]
        found.append(torch.bincount(slots.flatten() // placement.slots_per_rank, minlength=traffic.ranks))
    return torch.stack(found).double()


def balance_of(rows: torch.Tensor) -> torch.Tensor:
    """Maximum over mean along the last dimension."""
    return rows.amax(-1) / rows.mean(-1)


def floor(rows: int, ranks: int, random: torch.Generator, samples: int = 200) -> float:
    drawn = torch.randint(ranks, (samples, rows), generator=random)
    found = torch.stack([torch.bincount(each, minlength=ranks) for each in drawn]).double()
    return float(balance_of(found).mean())


def settle(
    traffic: Traffic, placement: Placement, rows: list[list[int]], limits: BalanceLimits
) -> tuple[Placement, int, int, float]:
    """Plan until nothing changes: the placement, plans, moves, and the time of the slowest plan in s."""
    plans, moves, slowest = 0, 0, 0.0
    while True:
        begin = time.perf_counter()
        plan = plan_balance(rows, placement, range(traffic.ranks), limits)
        slowest = max(slowest, time.perf_counter() - begin)
        if plan.placement == placement:
            return placement, plans, moves, slowest
        placement, plans, moves = plan.placement, plans + 1, moves + len(plan.moves)


def report(args: argparse.Namespace, ranks: int, slots: int) -> str:
    traffic = Traffic(args, ranks)
    first = first_placement(args.layers, args.experts, slots, range(ranks), ranks)
    limits = BalanceLimits(moves=args.moves, copies=int(args.experts * (1 + args.copies)))
    chosen, plans, moves, slowest = settle(traffic, first, counts(traffic, args.steps), limits)
    over, step = [], []
    for placement in (first, chosen):
        each = [rows_of_ranks(traffic, placement, n, args.steps, args.ways) for n in range(args.layers)]
        sums = torch.stack([balance_of(rows.sum(0)) for rows in each])
        over.append(f"{sums.mean():.3f}, {sums.max():.3f}")
        step.append(f"{torch.stack([balance_of(rows).mean() for rows in each]).mean():.3f}")
    copies = max(sum(map(bool, serves)) for serves in chosen.serves)
    chance = floor(ranks * args.tokens * args.top_k, ranks, traffic.random)
    cells = (ranks, slots, copies, *over, *step, f"{chance:.3f}", plans, f"{moves / args.layers:.1f}")
    return " | ".join(("", *map(str, cells), f"{slowest * 1e3:.0f}", "")).strip()


HEAD = (
    "ranks", "slots of a rank", "copies that serve", "first placement", "balanced", "a step, first",
    "a step, balanced", "floor of a step", "plans", "moves per layer", "slowest plan, ms",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--ranks", type=int, nargs="+", default=[4, 16, 64])
    option("--slots", type=int, nargs="+", default=[35, 9, 3], help="of a rank, by entry of --ranks")
    option("--copies", type=float, default=0.12, help="serving copies beyond one per expert, a share")
    option("--experts", type=int, default=128)
    option("--top-k", type=int, default=8)
    option("--layers", type=int, default=48)
    option("--tokens", type=int, default=64, help="of a rank in a step")
    option("--steps", type=int, default=100)
    option("--exponent", type=float, default=1.0)
    option("--moves", type=int, default=64, help="experts to load in one plan")
    option("--ways", type=int, default=WAYS, help="entries of a rank's table for an expert")
    option("--seed", type=int, default=1)
    args = parser.parse_args()
    print("max/mean rows of ranks: over all steps (mean of layers, worst layer), and of a single step\n")
    print(" | ".join(("", *HEAD, "")).strip())
    print("|---" * len(HEAD) + "|")
    for ranks, slots in zip(args.ranks, args.slots, strict=True):
        print(report(args, ranks, slots), flush=True)


if __name__ == "__main__":
    main()
